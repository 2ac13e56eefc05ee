"""Checkpoints of every form that people have, and files that are none."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from ul2q import QuantConfig, compress, models
from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.architectures import build_network
from ul2q.pipeline.importers.checkpoint import CheckpointRecord, load_checkpoint, save_checkpoint
from ul2q.pipeline.importers.quantized_sources import check_float
from ul2q.pipeline.importers.state_dict import fit, match_names

ARGS = {"in_channels": 1, "num_classes": 3, "input_size": [4, 4], "hidden": [5]}
NORM = {"in_channels": 1, "num_classes": 3, "input_size": [4, 4]}


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("mlp", **ARGS)


def load(path: Path, **options: Any) -> Any:
    return load_checkpoint(path, **{"arch": "mlp", "arch_args": ARGS, **options})


def same(loaded: nn.Module, model: nn.Module) -> bool:
    ours, theirs = loaded.state_dict(), model.state_dict()
    return set(ours) == set(theirs) and all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ein Modell é.pt"


# --- forms of weights


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "net."]
)
@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict", "net", "ema"])
@pytest.mark.case("parallel-prefix", "compile-prefix", "nested-state", "odd-file-name", outcome="works")
def test_wrapped_and_nested_weights(path: Path, prefix: str, key: str | None) -> None:
    model = mlp()
    state: dict[str, Any] = {prefix + k: v for k, v in model.state_dict().items()}
    momentum = {"state": {0: {"momentum_buffer": torch.zeros(5, 16)}}, "param_groups": [{"lr": 0.1}]}
    torch.save(state if key is None else {"epoch": 3, "optimizer": momentum, key: state}, path)
    assert same(load(path).model, model)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.case("odd-file-name", outcome="works")
def test_both_formats_of_torch(path: Path, legacy: bool) -> None:
    model = mlp()
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    loaded = load(path)
    assert same(loaded.model, model)
    assert not loaded.model.training
    assert (loaded.arch, loaded.arch_args, loaded.input_shape) == ("mlp", ARGS, (1, 4, 4))
    assert all(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.case("compile-prefix", outcome="works")
def test_weights_of_a_compiled_part_and_of_an_average(path: Path) -> None:
    model = mlp()
    inside = {k.replace("fc1.", "fc1._orig_mod."): v for k, v in model.state_dict().items()}
    torch.save(inside, path)
    assert same(load(path).model, model)
    torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), path)
    assert same(load(path).model, model)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_a_part_of_the_network_may_itself_be_called_module(prefix: str) -> None:
    state = {"module.weight": torch.zeros(2), "module.bias": torch.ones(2)}
    assert match_names({prefix + k: v for k, v in state.items()}, list(state)) == state


def test_names_that_never_agree_are_left_alone() -> None:
    state = {"a.weight": torch.zeros(2), "a.bias": torch.ones(2)}
    assert match_names(state, ["x", "y"]) == state


@pytest.mark.case("safetensors", outcome="works")
def test_safetensors(path: Path) -> None:
    model = mlp()
    save_file(model.state_dict(), path)
    assert same(load(path).model, model)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="damaged"):
        load(path)


@pytest.mark.case("nested-state", outcome="works")
def test_harmless_objects_beside_the_weights(path: Path) -> None:
    model = mlp()
    extra = {
        "args": argparse.Namespace(lr=0.1),
        "best": np.float64(0.5),
        "count": np.int64(3),
        "curve": np.arange(3.0),
        "state_dict": model.state_dict(),
    }
    torch.save(extra, path)
    assert same(load(path).model, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.case("half-weights", "double-weights", "frozen-weights", outcome="works")
def test_other_precisions_become_float32(path: Path, dtype: torch.dtype) -> None:
    model = mlp().to(dtype).requires_grad_(False)
    torch.save(model.state_dict(), path)
    loaded = load(path).model
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].float())


def test_tied_weights_stay_tied_in_our_files(path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_checkpoint(path, model, CheckpointRecord("x:y"))
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


class Tied(nn.Module):
    """A tensor under two names, with a third name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("kept", ["table.weight", "head.weight"])
@pytest.mark.case("tied-checkpoint", outcome="works")
def test_a_tied_tensor_may_be_saved_under_one_name(kept: str) -> None:
    source, target = Tied(), Tied()
    state = {k: v for k, v in source.state_dict().items() if k in {kept, "head.bias"}}
    fit(target, state, "it")
    assert same(target, source)
    assert target.head.weight is target.table.weight


@pytest.mark.case("tied-checkpoint", outcome="works")
def test_what_safetensors_writes_of_a_tied_network(path: Path) -> None:
    source, target = Tied(), Tied()
    save_model(source, path)
    assert len(load_file(path)) == 2
    fit(target, load_file(path), "it")
    assert same(target, source)


@pytest.mark.case("untied-checkpoint", outcome="refused")
def test_different_tensors_for_one_tied_tensor_are_refused() -> None:
    state = {k: v.clone() for k, v in Tied().state_dict().items()}
    fit(Tied(), state, "it")  # equal ones are right
    state["head.weight"][0, 0] += 1
    target = Tied()
    before = target.table.weight.clone()
    with pytest.raises(UsageError) as refused:
        fit(target, state, "it")
    assert str(refused.value) == (
        "it holds different weights for table.weight and head.weight, which are one tensor in Tied: give an "
        "architecture that does not tie them"
    )
    assert torch.equal(target.table.weight, before)


@pytest.mark.parametrize("key", ["ema", "model_ema", "state_dict_ema", "params_ema", "ema_state_dict"])
@pytest.mark.parametrize("plain", ["state_dict", "model", "params"])
@pytest.mark.case("averaged-weights", outcome="warned")
def test_the_average_over_the_training_is_the_default_and_the_choice_is_said(
    path: Path, key: str, plain: str
) -> None:
    torch.save({plain: mlp(0).state_dict(), key: mlp(1).state_dict(), "epoch": 3}, path)
    loaded = load(path)
    assert same(loaded.model, mlp(1))
    assert loaded.notes == (
        f"the weights are those at {key}, the average over the training; the file also has {plain} "
        "(`weights`)",
    )
    chosen = load(path, weights=plain)
    assert same(chosen.model, mlp(0))
    assert chosen.notes == ()


def test_a_key_without_weights_is_refused_with_the_keys_that_have_some(path: Path) -> None:
    torch.save({"run": {"last": mlp(0).state_dict(), "best": mlp(1).state_dict()}, "epoch": 3}, path)
    assert same(load(path, weights="run.best").model, mlp(1))
    torch.save({"a": mlp(0).state_dict(), "b": mlp(1).state_dict()}, path)
    with pytest.raises(UsageError, match=r"`weights` c: no weights there; the file has them at a, b$"):
        load(path, weights="c")


def test_an_average_of_the_parameters_alone_is_left(path: Path) -> None:
    average = {k: v for k, v in mlp(1).state_dict().items() if not k.startswith("fc1")}
    torch.save({"model": mlp(0).state_dict(), "ema": average}, path)
    loaded = load(path)
    assert same(loaded.model, mlp(0))
    assert loaded.notes[1] == "the weights at ema do not fit mlp"


@pytest.mark.case("unwanted-weights", outcome="works")
def test_weights_that_no_layer_wants_are_ignored_on_request(path: Path) -> None:
    torch.save({**mlp().state_dict(), "criterion.weight": torch.ones(3), "metric.total": torch.ones(1)}, path)
    assert same(load(path, ignore=["criterion.*", "metric.*"]).model, mlp())
    with pytest.raises(UsageError, match=r"1 unexpected: metric\.total; `ignore` leaves out"):
        load(path, ignore=["criterion.*"])
    with pytest.raises(UsageError, match=r"`ignore` fc1\.\*: it matches no weight that the network does not"):
        load(path, ignore=["fc1.*"])


class WithNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def trained_for_quantisation() -> nn.Module:
    model = torch.ao.quantization.QuantWrapper(WithNorm())
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model.train())


def observed() -> nn.Module:
    model = torch.ao.quantization.QuantWrapper(WithNorm().eval())
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    return torch.ao.quantization.prepare(model)


def dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(WithNorm(), {nn.Linear})


def converted() -> nn.Module:
    model = observed()
    model(torch.randn(2, 1, 4, 4))
    return torch.ao.quantization.convert(model)


QUANTIZED = {
    trained_for_quantisation: "fake quantisers of quantisation-aware training",
    observed: "observers of torch.ao.quantization",
    dynamic: "a converted int8 network of torch.ao.quantization",
    converted: "a converted int8 network of torch.ao.quantization",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", QUANTIZED)
@pytest.mark.case("quantised-source", outcome="refused")
def test_quantised_networks_are_told_in_one_line(path: Path, make: Any) -> None:
    model = make()
    whole = [model] if make in {dynamic, converted} else []  # observers cannot be pickled
    for content in (*whole, model.state_dict(), {"state_dict": model.state_dict(), "epoch": 2}):
        torch.save(content, path)
        with pytest.raises(UsageError, match=QUANTIZED[make]) as refused:
            load(path, arch=None, trust_pickle=True)
        assert str(refused.value).endswith(": give the float network that it was made from")
        assert len(str(refused.value)) <= 300
    with pytest.raises(UsageError, match=QUANTIZED[make]):
        compress(model, np.zeros((4, 1, 4, 4), np.float32), QuantConfig(wbits=4))


@pytest.mark.parametrize("name", ["h.0.qweight", "h.0.weight.quant_state.bitsandbytes__nf4", "h.0.SCB"])
@pytest.mark.case("quantised-source", outcome="refused")
def test_weights_of_other_quantisers(path: Path, name: str) -> None:
    save_file({name: torch.zeros(3, dtype=torch.int32), "h.0.bias": torch.zeros(3)}, path)
    with pytest.raises(UsageError, match=f"is quantised already: .* \\(at {name}\\): give the float"):
        load(path)


@pytest.mark.case("quantised-source", outcome="refused")
def test_gguf(path: Path) -> None:
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(100))
    with pytest.raises(UsageError, match="is a GGUF file, whose weights are quantised: give a torch"):
        load(path)


def test_float_networks_with_such_names_are_no_quantised_ones() -> None:
    check_float(
        {"scale": torch.ones(1), "zero_point_head.weight": torch.ones(1), "SCBlock.w": torch.ones(1)}, "it"
    )
    check_float(WithNorm(), "it")


@pytest.mark.case("meta-weights", outcome="refused")
def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = WithNorm()
    with pytest.raises(UsageError, match=r"without values \(0.weight is on the meta device\): load them"):
        compress(model, np.zeros((4, 1, 4, 4), np.float32), QuantConfig(wbits=4))


@pytest.mark.case("nested-state", outcome="works")
@pytest.mark.parametrize("key", ["params", "weights", "generator"])
def test_weights_under_any_single_key(path: Path, key: str) -> None:
    torch.save({key: mlp().state_dict(), "iter": 7, "optimizer": {"state": {}, "param_groups": []}}, path)
    assert same(load(path).model, mlp())


def test_several_networks_are_named_and_none_is_chosen(path: Path) -> None:
    torch.save({"generator": mlp().state_dict(), "critic": mlp(1).state_dict(), "iter": 7}, path)
    with pytest.raises(UsageError, match=r"holds weights at generator, critic: choose with `weights`$"):
        load(path)
    assert same(load(path, weights="critic").model, mlp(1))


@pytest.mark.parametrize("prefix", ["model.", "model.net.", "module.student."])
def test_what_stands_beside_the_network_is_all_that_is_unexpected(path: Path, prefix: str) -> None:
    weights = {prefix + name: value for name, value in mlp().state_dict().items()}
    torch.save({"state_dict": {**weights, "criterion.weight": torch.ones(3)}}, path)
    with pytest.raises(UsageError) as refused:
        load(path)
    assert str(refused.value) == (
        f"{path} does not fit MLP: 1 unexpected: criterion.weight; `ignore` leaves out what no layer wants"
    )


def test_a_prefix_of_some_names_is_no_difference_if_all_fit() -> None:
    state = {"backbone.a.weight": torch.ones(1), "fc.weight": torch.ones(2)}
    assert set(match_names(state, ["a.weight", "fc.weight"])) == {"a.weight", "fc.weight"}
    # but no two tensors take one name, whatever wraps them
    compiled = {"_orig_mod.a.weight": torch.ones(1), "a.weight": torch.ones(1)}
    assert set(match_names(compiled, ["a.weight", "b.weight"])) == set(compiled)
    state["a.weight"] = torch.zeros(1)
    assert set(match_names(state, ["a.weight", "fc.weight"])) == set(state)


# --- what does not fit


def broken(change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    state = dict(mlp().state_dict())
    change(state)
    return state


@pytest.mark.case("wrong-keys", outcome="refused")
def test_all_differences_are_named_and_nothing_is_loaded(path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["fc1.wight"] = state.pop("fc1.weight")
        state["extra"] = torch.zeros(7)
        state["fc2.bias"] = torch.zeros(4)
        state["fc2.weight"] = state["fc2.weight"].to(torch.int8)

    torch.save(broken(change), path)
    with pytest.raises(UsageError) as error:
        load(path)
    assert str(error.value) == (
        f"{path} does not fit MLP: 1 missing: fc1.weight (nearest: fc1.wight); "
        "2 unexpected: fc1.wight, extra; "
        "1 of another shape: fc2.bias [4] instead of [3]; "
        "1 of another type: fc2.weight torch.int8 instead of torch.float32"
    )


def test_the_weights_of_a_large_network_are_named_in_part(path: Path) -> None:
    layers = {f"blocks.{i}.weight": torch.zeros(1) for i in range(1_021)}
    torch.save(layers, path)
    with pytest.raises(
        UsageError, match=r"1021 unexpected: blocks\.0\.weight, .* and 1,0\d\d more$"
    ) as refused:
        load(path)
    assert len(str(refused.value)) <= 300
    assert refused.value.full.endswith(", blocks.1020.weight")  # with --debug


@pytest.mark.case("wrong-keys", outcome="refused")
def test_failing_fit_leaves_the_module_as_it_was() -> None:
    model, other = mlp(0), mlp(1)
    state = {k: v for k, v in other.state_dict().items() if k != "fc2.bias"}
    with pytest.raises(UsageError, match=r"1 missing: fc2\.bias"):
        fit(model, state, "x")
    assert same(model, mlp(0))


@pytest.mark.case("weights-not-finite", outcome="refused")
def test_weights_that_are_not_finite_are_counted(path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["fc1.bias"] = torch.tensor([1.0, np.nan, np.inf, -np.inf, 2.0])
        state["fc2.bias"] = torch.tensor([1e300, 0.0, 0.0], dtype=torch.float64)  # infinite as float32

    torch.save(broken(change), path)
    with pytest.raises(UsageError) as error:
        load(path)
    assert "fc1.bias (1 NaN, 2 infinite of 5), fc2.bias (0 NaN, 1 infinite of 3)" in str(error.value)


def test_missing_batch_counters_are_no_difference(path: Path) -> None:
    model = models.build("lenet5", **NORM)
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, path)
    assert same(load(path, arch="lenet5", arch_args=NORM).model, model)


def test_weights_without_a_network(path: Path) -> None:
    torch.save(mlp().state_dict(), path)
    with pytest.raises(UsageError, match=r"holds weights only: name the network with `arch` \(.*mlp"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [1, 2], "text", 5])
def test_files_without_weights(path: Path, content: Any) -> None:
    torch.save(content, path)
    with pytest.raises(UsageError, match="holds no weights"):
        load(path)


# --- code


class Marked(nn.Linear):
    """Its class is importable from here only."""


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.case("pickled-module", outcome="refused")
@pytest.mark.case("pickled-module", outcome="trusted")
def test_pickled_module_needs_trust(path: Path, legacy: bool, nested: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.BatchNorm1d(2)).requires_grad_(False)
    torch.save({"model": model} if nested else model, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(
        UsageError, match=r"pickled objects \(torch\.nn\S+\), which can run code .*`trust_pickle=True`"
    ):
        load_checkpoint(path)
    loaded = load_checkpoint(path, trust_pickle=True)
    assert loaded.arch is None
    assert torch.equal(loaded.model[0].weight, model[0].weight.float())  # type: ignore[index]
    assert not loaded.model.training
    assert all(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.case("pickled-parallel", outcome="trusted")
@pytest.mark.case("pickled-parallel", outcome="refused")
def test_wrapped_pickled_module_is_unwrapped(path: Path) -> None:
    model = mlp()
    torch.save(nn.DataParallel(model), path)
    with pytest.raises(UsageError, match=r"pickled objects .*`trust_pickle=True`"):
        load_checkpoint(path)
    loaded = load_checkpoint(path, trust_pickle=True)
    assert type(loaded.model).__name__ == "MLP"
    assert same(load(path, trust_pickle=True).model, model)


@pytest.mark.case("pickled-module-without-class", outcome="refused")
def test_pickled_module_whose_class_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = types.ModuleType("gone")
    network = type("Net", (nn.Linear,), {"__module__": "gone"})
    monkeypatch.setattr(gone, "Net", network, raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gone", gone)
        torch.save(network(2, 2), path)
    with pytest.raises(UsageError, match=r"pickled objects \(gone\.Net\)"):
        load_checkpoint(path)
    with pytest.raises(UsageError, match=r"a class that cannot be imported .*gone.*PYTHONPATH"):
        load_checkpoint(path, trust_pickle=True)


def test_pickled_module_whose_class_is_in_the_current_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "pickled_nets_of_this_test"
    (tmp_path / f"{name}.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        torch.save(importlib.import_module(name).Net(2, 2), path)
    del sys.modules[name]
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match="a class that cannot be imported"):
        load_checkpoint(path, trust_pickle=True)
    monkeypatch.chdir(tmp_path)
    assert type(load_checkpoint(path, trust_pickle=True).model).__name__ == "Net"
    monkeypatch.delitem(sys.modules, name)


def test_a_file_of_ours_cannot_name_code_to_run(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    save_checkpoint(path, mlp(), CheckpointRecord("mlp", ARGS))
    content = torch.load(path, weights_only=True)
    content |= {"arch": "os:system", "arch_args": {"command": f"touch {target}"}}
    torch.save(content, path)
    with pytest.raises(UsageError, match=r"names os:system as its network, which is code: give `arch`"):
        load_checkpoint(path)
    assert not target.exists()


@pytest.mark.case("malformed-file", outcome="refused")
def test_a_network_larger_than_its_weights_is_refused_before_memory_is_taken(path: Path) -> None:
    save_checkpoint(path, mlp(), CheckpointRecord("mlp", {**ARGS, "hidden": [10**12]}))
    with pytest.raises(UsageError, match=r"fc1\.weight \[5, 16\] instead of \[1000000000000, 16\]"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state_dict", None),
        ("state_dict", {"a": 1}),
        ("arch", 3),
        ("arch_args", [1]),
        ("classes", 5),
        ("epoch", "x"),
    ],
)
def test_a_file_of_ours_with_other_types_is_damaged(path: Path, key: str, value: Any) -> None:
    save_checkpoint(path, mlp(), CheckpointRecord("mlp", ARGS))
    torch.save(torch.load(path, weights_only=True) | {key: value}, path)
    with pytest.raises(UsageError, match=rf"is damaged \({key}\)"):
        load_checkpoint(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_runs_without_trust(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"state_dict": mlp().state_dict(), "x": Evil()}, path, _use_new_zipfile_serialization=not legacy
    )
    with pytest.raises(UsageError, match="which can run code"):
        load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.case("torchscript", "pt2", outcome="refused")
def test_programs_are_refused_with_the_safe_way(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)), path.with_suffix(".pt2"))
    with pytest.raises(UsageError, match=r"torch\.export archive.*save model\.state_dict\(\)"):
        load(path.with_suffix(".pt2"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/code/__torch__.py", "")
        archive.writestr("m/data.pkl", "")
    with pytest.raises(UsageError, match=r"TorchScript archive.*save model\.state_dict\(\)"):
        load(path)
    with pytest.raises(UsageError, match=r"cannot be loaded in torch .*save model\.state_dict\(\)"):
        load(path, trust_pickle=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"<html>not found</html>", "a text file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\x00\x01\x02\x03" * 9, "unknown format"),
        (b"\x80\x04garbage", "damaged"),
    ],
)
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.case("empty-file", "text-file", outcome="refused")
def test_files_that_are_no_checkpoints(path: Path, content: bytes, message: str, trust: bool) -> None:
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        load(path, trust_pickle=trust)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.case("truncated-file", outcome="refused")
def test_truncated_files(path: Path, legacy: bool, share: float) -> None:
    torch.save(mlp().state_dict(), path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match=r"truncated or damaged|is damaged or no checkpoint"):
        load(path)


@pytest.mark.case("other-zip", outcome="refused")
def test_a_zip_that_is_no_checkpoint(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "")
    with pytest.raises(UsageError, match="zip archive without a checkpoint"):
        load(path)


@pytest.mark.case("folder-as-file", "no-permission", outcome="refused")
def test_missing_folder_and_forbidden(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load(path)
    with pytest.raises(UsageError, match="is a folder"):
        load(tmp_path)
    path.write_bytes(b"x")

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(UsageError, match="no permission"):
        load(path)


# --- networks of the user's own


def test_own_network_by_module_and_callable(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_nets_of_this_test.py").write_text(
        "from torch import nn\n"
        "class Nets:\n"
        "    def small(width=2):\n        return nn.Linear(width, 2)\n"
        "    def number():\n        return 3\n"
        "    def broken(**_):\n        raise ValueError('no such\\nblock')\n"
        "    def unfinished():\n        return nn.Linear(wide, 2)\n"
    )
    (tmp_path / "own_cut_nets_of_this_test.py").write_text("def small(:\n")
    (tmp_path / "own_bad_nets_of_this_test.py").write_text("1 / 0\n")
    name = "own_nets_of_this_test:Nets"
    model = nn.Linear(4, 2)
    torch.save(model.state_dict(), path)
    loaded = load_checkpoint(path, arch=f"{name}.small", arch_args={"width": 4})
    assert same(loaded.model, model)
    assert loaded.input_shape is None
    with pytest.raises(UsageError, match="does not take"):
        build_network(f"{name}.small", {"depth": 4})
    with pytest.raises(UsageError, match="gives a int"):
        build_network(f"{name}.number", {})
    with pytest.raises(UsageError, match=rf"^{name}\.broken fails with .*: ValueError: no such: "):
        build_network(f"{name}.broken", {"width": 4})
    with pytest.raises(UsageError, match=r"unfinished fails with \{\}: NameError: name 'wide'"):
        build_network(f"{name}.unfinished", {})
    for kind, error in (("cut", "SyntaxError"), ("bad", "ZeroDivisionError: division by zero")):
        with pytest.raises(UsageError, match=rf"own_{kind}_nets_of_this_test:f cannot be imported: {error}"):
            build_network(f"own_{kind}_nets_of_this_test:f", {})
    for wrong in (f"{name}.large", "no_such_module_here:f", "own_nets_of_this_test:"):
        with pytest.raises(UsageError, match="cannot be imported"):
            build_network(wrong, {})


def test_unknown_network(path: Path) -> None:
    torch.save(mlp().state_dict(), path)
    with pytest.raises(UsageError, match="did you mean mlp"):
        load(path, arch="mlpp")


# --- our own format


def saved(path: Path, **changes: Any) -> nn.Module:
    model = mlp()
    values: dict[str, Any] = {
        "arch": "mlp",
        "arch_args": ARGS,
        "data": {"spec": "digits", "split": {"seed": 1}},
        "preprocess": Preprocess(scale=0.5, mean=(0.1,)),
        "input_shape": (1, 4, 4),
        "classes": ("a", "b", "c"),
        "metrics": {"test_accuracy": np.float64(0.5)},
        "kfac": {"layers": {"fc1": {"A": torch.ones(3)}}},
        "optimizer": {"state": {0: {"step": 3}}, "betas": (0.9, 0.99)},
        "epoch": 4,
        "rng": {"torch": torch.get_rng_state()},
    }
    save_checkpoint(path, model, CheckpointRecord(**{**values, **changes}))
    return model


@pytest.mark.case("own-checkpoint", outcome="works")
def test_round_trip(path: Path) -> None:
    model = saved(path)
    loaded = load_checkpoint(path)
    assert same(loaded.model, model)
    assert loaded.preprocess == Preprocess(scale=0.5, mean=(0.1,))
    assert (loaded.arch, loaded.arch_args, loaded.input_shape) == ("mlp", ARGS, (1, 4, 4))
    assert (loaded.classes, loaded.epoch) == (("a", "b", "c"), 4)
    assert loaded.data == {"spec": "digits", "split": {"seed": 1}}
    assert loaded.metrics == {"test_accuracy": 0.5}
    assert loaded.optimizer == {"state": {0: {"step": 3}}, "betas": (0.9, 0.99)}
    assert loaded.kfac is not None
    assert torch.equal(loaded.kfac["layers"]["fc1"]["A"], torch.ones(3))
    assert loaded.rng is not None
    assert loaded.path == path
    keys = set(torch.load(path, weights_only=True))
    assert keys == {
        "format", "arch", "arch_args", "state_dict", "data", "preprocess", "input_shape", "classes",
        "metrics", "kfac", "optimizer", "epoch", "rng",
    }  # fmt: skip


def test_same_content_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    saved(path)
    again = tmp_path / "other" / "name.pt"
    again.parent.mkdir()
    content = load_checkpoint(path)
    save_checkpoint(again, content.model, content)
    assert again.read_bytes() == path.read_bytes()
    assert load_checkpoint(again).sha256 == content.sha256


def test_recorded_network_can_be_overridden(path: Path) -> None:
    saved(path)
    with pytest.raises(UsageError, match="of another shape"):
        load_checkpoint(path, arch_args={**ARGS, "num_classes": 4})
    with pytest.raises(UsageError, match="does not fit LeNet5"):
        load_checkpoint(path, arch="lenet5", arch_args=NORM)
