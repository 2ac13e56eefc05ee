"""What cannot work is refused in one line that says what, where and what to do."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras
from keras import layers

from ul2q.exporters.keras.save import save_keras
from ul2q.exporters.keras.to_onnx import to_onnx
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.keras.to_torch import to_torch
from ul2q.runtimes.keras import EMAQuantizer, UL2QConv2D, UL2QDense, calibrate, load_onnx, quantize_model
from ul2q.runtimes.keras.keras_files import load_keras


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_files_that_are_not_ours(written: Callable[..., Any], tmp_path: Path) -> None:
    source = written("resnet8", 2).path
    path = tmp_path / "model.onnx"
    refused(lambda: load_onnx(path), "does not exist")
    path.write_bytes(source.read_bytes()[:-9000])
    refused(lambda: load_onnx(path), "truncated")
    path.write_text("hello")
    refused(lambda: load_onnx(path), "not an ONNX file")
    model = onnx.load(source)
    kept = list(model.metadata_props)
    del model.metadata_props[:]
    onnx.save(model, path)
    refused(lambda: load_onnx(path), "not written by ul2q", "compress")
    model.metadata_props.extend(kept)
    (entry,) = [p for p in model.metadata_props if p.key == "ul2q.layers"]
    rows, entry.value = entry.value, "[{"
    onnx.save(model, path)
    refused(lambda: load_onnx(path), "damaged", "compress the model again")
    entry.value = json.dumps([r for r in json.loads(rows) if r["name"] != "layer2.0.conv1"])
    onnx.save(model, path)
    refused(lambda: load_onnx(path), "says nothing of layer2.0.conv1")
    entry.value = rows.replace('"m":', '"m":1,"was":', 1)
    onnx.save(model, path)
    refused(lambda: load_onnx(path), "are not the 2-bit codes")
    entry.value = rows
    (node,) = [n for n in model.graph.node if n.op_type == "GlobalAveragePool"]
    node.op_type = "LpPool"
    onnx.save(model, path)
    refused(lambda: load_onnx(path), "avgpool", "LpPool", "does not know")


def test_channels_first(written: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("resnet8", 2).path
    model = keras.Sequential(
        [keras.Input((1, 8, 8)), layers.ZeroPadding2D(1, data_format="channels_first"), layers.Flatten()]
    )
    refused(lambda: quantize_model(model, 2), "channels_first", "channels_last")
    refused(lambda: to_torch(model), "channels_first", "channels_last")
    refused(lambda: UL2QConv2D(2, 3, data_format="channels_first"), "channels_last", "transpose")
    monkeypatch.setattr(keras.config, "image_data_format", lambda: "channels_first")
    refused(lambda: load_onnx(source), "channels_first", "set_image_data_format")


def test_models_without_a_graph(tmp_path: Path) -> None:
    class Mine(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    for call in (lambda: quantize_model(Mine(), 2), lambda: to_onnx(Mine(), tmp_path / "m.onnx")):
        refused(call, "Mine is a subclassed model", "keras.Model(inputs, outputs)")
    refused(lambda: quantize_model(keras.Sequential([layers.Dense(3)]), 2), "not built", "keras.Input")


def test_layers_without_an_onnx_form(tmp_path: Path) -> None:
    parts = [layers.Permute((2, 1), name="turned"), layers.Flatten(), layers.Dense(2)]
    quantised = quantize_model(keras.Sequential([keras.Input((5, 3)), *parts]), 2)
    refused(lambda: to_onnx(quantised, tmp_path / "m.onnx"), "turned is a Permute", "known are")
    free = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(2, 3)])
    refused(lambda: to_torch(free), "must be fixed")


def test_arguments_out_of_range() -> None:
    refused(lambda: UL2QDense(3, wbits=9), "`wbits` is 9")
    refused(lambda: UL2QDense(3, abits=4), "`abits` is 4")
    refused(lambda: UL2QDense(3, granularity="row"), "granularity")
    refused(lambda: UL2QDense(3, frozen=True), "load it with load_onnx")
    refused(lambda: UL2QConv2D(2, 3, strides=2, dilation_rate=2), "strides together with a dilation")
    refused(lambda: UL2QConv2D(4, 3, groups=3)(np.ones((1, 5, 5, 2))), "groups do not divide")
    refused(lambda: EMAQuantizer(fit="median"), "minmax, normal")
    refused(lambda: EMAQuantizer(momentum=1.0), "momentum")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="only")])
    refused(lambda: quantize_model(model, 0), "`wbits` is 0")
    refused(lambda: quantize_model(model, 2, exclude=["no*"]), "`exclude` no*", "only")
    refused(lambda: quantize_model(model, 2, exclude=["only"]), "nothing to quantise")
    refused(lambda: quantize_model(quantize_model(model, 2), 2), "quantised already")
    refused(lambda: calibrate(model, []), "no EMAQuantizer")
    refused(lambda: calibrate(quantize_model(model, 2), []), "no batches")


def test_models_that_are_not_ready(written: Callable[..., Any], tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    refused(lambda: to_onnx(model, tmp_path / "m.onnx"), "no μL2Q layers", "quantize_model")
    refused(
        lambda: to_onnx(load_onnx(written("resnet8", 2).path), tmp_path / "m.onnx"),
        "frozen",
        "trainable=True",
    )
    bare = keras.Sequential([keras.Input((4,)), EMAQuantizer(behind="x"), UL2QDense(2, name="d")])
    refused(lambda: to_onnx(bare, tmp_path / "m.onnx"), "EMAQuantizer")


def test_keras_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x + 1)]).save(path)
    refused(lambda: load_keras(path), "cannot be loaded", "Lambda")
    path.write_bytes(path.read_bytes()[:400])
    refused(lambda: load_keras(path), "damaged")


def resized(path: Path, target: Path, old: bytes, new: bytes) -> None:
    """Write a copy of a .keras file whose configuration says ``new`` for ``old``."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        for name in source.namelist():
            content = source.read(name)
            assert name != "config.json" or old in content
            copy.writestr(name, content.replace(old, new) if name == "config.json" else content)


@pytest.mark.case("malformed-file", outcome="refused")
def test_networks_larger_than_their_weights_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    wide = keras.Sequential([keras.Input((3,)), UL2QDense(5000, wbits=2)])
    path, absurd = tmp_path / "wide.keras", tmp_path / "absurd.keras"
    save_keras(wide, path)
    assert load_keras(path).count_params() == wide.count_params()
    resized(path, absurd, b'"units":5000', b'"units":4000000000')
    refused(lambda: load_keras(absurd), "describes a network of ", "but holds weights of ", "damaged")
    # what was laid out for the check is not made later
    assert keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).count_params() == 8
