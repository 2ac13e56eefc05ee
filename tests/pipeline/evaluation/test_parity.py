"""Verification: what it reports, and files that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

from ul2q.pipeline.errors import JobError
from ul2q.pipeline.evaluation import parity as module
from ul2q.pipeline.evaluation.parity import Comparison, run_with_codes, verify
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.cpu import kernels_saturate

#: every layer has codes to compare, and small networks have no weights beyond ±64
AS_PUBLISHED = {"step": "paper", "granularity": "tensor"}


class Mixed(nn.Module):
    """Integers, a float operator, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(F.relu(self.first(x)))))


@pytest.fixture(scope="module")
def integers(deploy: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return deploy(net, [torch.randn(40, 6)], wbits=8, **AS_PUBLISHED)


@pytest.fixture(scope="module")
def mixed(deploy: Any) -> Any:
    torch.manual_seed(0)
    return deploy(Mixed(), [torch.randn(40, 6)], wbits=8, **AS_PUBLISHED)


def tampered(deployed: Any, path: Path, changes: dict[str, Callable[[Any], Any]]) -> Path:
    """Write the file with some initialisers changed."""
    proto = onnx.load(deployed.path)
    tensors = {t.name: t for t in proto.graph.initializer}
    for name, change in changes.items():
        array = numpy_helper.to_array(tensors[name])
        changed = np.asarray(change(array.copy())).astype(array.dtype)
        assert not np.array_equal(changed, array)
        tensors[name].CopyFrom(numpy_helper.from_array(changed, name))
    onnx.save(proto, path)
    return path


def check(deployed: Any, path: Path) -> module.Parity:
    return verify(path, deployed.lowered, deployed.exported.code_tensors, [deployed.inputs])[0]


def flip_one(codes: Any) -> Any:
    """Change one code of one weight by as much as the sign bit."""
    codes.reshape(-1)[0] ^= -128
    return codes


@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_one_changed_weight_is_found_and_its_layer_named(integers: Any, tmp_path: Path, layer: str) -> None:
    path = tampered(integers, tmp_path / "model.onnx", {f"{layer}.weight": flip_one})
    with pytest.raises(
        JobError, match=rf"^model\.onnx does not reproduce the network: \d+ codes .* first at {layer} by"
    ):
        check(integers, path)


def test_of_several_wrong_layers_the_first_is_named(integers: Any, tmp_path: Path) -> None:
    path = tampered(integers, tmp_path / "model.onnx", {f"{n}.weight": flip_one for n in ("4", "2")})
    with pytest.raises(JobError, match=r"first at 2 by \d+ steps \(0 allowed\)"):
        check(integers, path)


def test_a_wrong_output_is_found_though_every_code_is_right(deploy: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    deployed = deploy(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), [torch.randn(9, 6)], wbits=8)
    proto = onnx.load(deployed.path)
    (tanh,) = [node for node in proto.graph.node if node.op_type == "Tanh"]
    tanh.op_type = "Sigmoid"
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(JobError, match=r"its outputs differ by .* \(relative, at most 1e-04 allowed\)"):
        check(deployed, tmp_path / "model.onnx")
    tanh.op_type = "Log"  # of negative numbers: NaN must not pass for agreement
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(JobError, match="its outputs differ by inf"):
        check(deployed, tmp_path / "model.onnx")


def test_float_activations_are_held_to_a_relative_difference(deploy: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    deployed = deploy(nn.Sequential(nn.Linear(6, 4)), [torch.randn(9, 6)], wbits=8, abits=32)
    for factor, accepted in ((1 + 1e-5, True), (1 + 1e-3, False)):
        path = tampered(deployed, tmp_path / "model.onnx", {"0.weight_scale": lambda s, f=factor: s * f})
        if accepted:
            assert 1e-6 < check(deployed, path).relative < 1e-4
        else:
            with pytest.raises(JobError, match="its outputs differ by"):
                check(deployed, path)


def test_behind_float_operators_one_step_passes_and_is_reported(mixed: Any, tmp_path: Path) -> None:
    assert mixed.lowered.float_operators == ("gelu",)
    head = mixed.lowered.module.get_submodule("head")
    step = int(np.rint(head.out.scale / float(head.bias_scale[1])))  # bias units of one output step

    def shift(steps: int) -> Path:
        def change(bias: Any) -> Any:
            bias[1] += steps * step
            return bias

        return tampered(mixed, tmp_path / "model.onnx", {"head.bias": change})

    parity = check(mixed, shift(1))
    x = mixed.inputs[0]
    ours, codes = run_with_codes(mixed.lowered, [x])
    theirs = runtime.run(runtime.session(tmp_path / "model.onnx"), x.numpy())["logits"]
    difference = np.abs(ours[0].numpy() - theirs)
    assert (parity.first_layer, parity.first_steps, parity.samples) == ("head", 1, 40)
    assert parity.differing_codes == np.count_nonzero(difference) > 20
    assert parity.max_abs == difference.max()
    assert parity.max_steps == pytest.approx(1, rel=1e-5)
    assert parity.argmax_agreement == np.mean(ours[0].argmax(1).numpy() == theirs.argmax(1))
    assert set(codes) == {"x", "first", "second", "gelu", "head"}
    assert parity.to_dict() == {
        "max_abs": parity.max_abs, "max_steps": parity.max_steps, "first_layer": "head",
        "argmax_agreement": parity.argmax_agreement,
    }  # fmt: skip
    with pytest.raises(JobError, match=r"first at head by 2 steps \(1 allowed\)"):
        check(mixed, shift(2))


def signed(deployed: Any, path: Path) -> Path:
    """Write the file with its uint8 weights as int8, as a file is that saturating kernels get wrong."""
    proto = onnx.load(deployed.path)
    tensors = {t.name: t for t in proto.graph.initializer}
    for node in proto.graph.node:
        stored = tensors.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if stored is None or stored.data_type != onnx.TensorProto.UINT8:
            continue
        for tensor in (stored, tensors[node.input[2]]):
            array = numpy_helper.to_array(tensor).astype(np.int16) - 128
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.int8), tensor.name))
    onnx.save(proto, path)
    return path


@pytest.fixture(scope="module")
def wide(deploy: Any) -> Any:
    """A layer with weights beyond ±64 of the same sign beside each other, and inputs of large codes."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 8)
    linear.weight.data = torch.randn(8, 64).sort(1).values
    return deploy(
        linear, [torch.rand(40, 64) + torch.tensor([0.0, 1.0]).repeat(20)[:, None]], wbits=8, **AS_PUBLISHED
    )


def test_a_file_is_verified_in_a_plain_and_an_accurate_session(wide: Any) -> None:
    assert wide.exported.unsigned
    parity = check(wide, wide.path)
    assert parity.accurate is not None
    assert (parity.differing_codes, parity.accurate.differing_codes) == (0, 0)
    assert parity.by_runtime("onnxruntime") == {
        "onnxruntime": parity.to_dict(), "onnxruntime_accurate": parity.accurate.to_dict(),
    }  # fmt: skip


@pytest.mark.skipif(not kernels_saturate(), reason="the kernels of this CPU do not saturate")
def test_saturating_kernels_are_found_though_an_accurate_session_agrees(wide: Any, tmp_path: Path) -> None:
    path = signed(wide, tmp_path / "model.onnx")
    x, reference = wide.inputs[0], wide.lowered.module(*wide.inputs).numpy()
    accurate = runtime.run(runtime.session(path, accurate=True), x.numpy())
    np.testing.assert_array_equal(next(iter(accurate.values())), reference)
    message = (
        r"^model\.onnx does not reproduce the network: \d+ codes differ in a plain session of this ONNX "
        r"Runtime, though not with session\.x64quantprecision=1, first at .* by \d+ steps \(0 allowed\); "
        r"compress with `wbits=7` or `target='portable'`$"
    )
    with pytest.raises(JobError, match=message):
        check(wide, path)


def test_a_plain_session_that_differs_is_a_failed_job_on_every_cpu(
    wide: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = wide.lowered.weights
    other, _ = runtime.with_outputs(
        tampered(wide, tmp_path / "other.onnx", {f"{name}.weight": lambda w: 255 - w}),
        list(wide.exported.code_tensors.values()),
    )
    session = runtime.session

    def plain_differs(model: Any, *, accurate: bool, **options: Any) -> Any:
        return session(model if accurate else other, accurate=accurate, **options)

    monkeypatch.setattr(runtime, "session", plain_differs)
    with pytest.raises(JobError, match=r"in a plain session .* compress with `wbits=7` or `target="):
        check(wide, wide.path)


def test_samples_are_compared_in_pieces(integers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = integers.inputs
    whole = verify(integers.path, integers.lowered, integers.exported.code_tensors, [inputs])
    per_sample = 6 + 8 + 8 + 4 + 4 * 6
    monkeypatch.setattr(module, "_BYTES_AT_A_TIME", 7 * per_sample)
    seen: list[int] = []
    handle = integers.lowered.module.register_forward_hook(lambda _m, args, _y: seen.append(len(args[0])))
    pieces = verify(integers.path, integers.lowered, integers.exported.code_tensors, [inputs])
    handle.remove()
    assert seen == [1, 7, 7, 7, 7, 7, 5]
    assert pieces[0] == whole[0]
    halves = [[x[part] for x in inputs] for part in (slice(None, 10), slice(10, None))]
    assert verify(integers.path, integers.lowered, integers.exported.code_tensors, halves)[0] == whole[0]
    np.testing.assert_array_equal(pieces[1], whole[1])
    np.testing.assert_array_equal(
        whole[1], runtime.run(runtime.session(integers.path), inputs[0].numpy())["logits"]
    )


def test_a_file_that_the_runtime_refuses_is_a_failed_job(integers: Any, tmp_path: Path) -> None:
    proto = onnx.load(integers.path)
    proto.graph.node[0].op_type = "QuantiseLinear"
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(JobError, match=r"^model\.onnx does not load in this ONNX Runtime: "):
        check(integers, tmp_path / "model.onnx")


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    comparison = Comparison({"mean": "mean/Reshape"})
    codes = torch.zeros(4, 3, dtype=torch.uint8)
    comparison.add_codes({"mean": codes}, {"mean/Reshape": codes.numpy()})
    with pytest.raises(
        JobError, match=r"the codes at mean is \(4, 3, 1, 1\) in the file and \(4, 3\) in the"
    ):
        comparison.add_codes({"mean": codes}, {"mean/Reshape": codes.numpy()[:, :, None, None]})
    outputs = [torch.zeros(4, 3), torch.zeros(4, 3)]
    with pytest.raises(JobError, match=r"output 1 is \(4, 1\) in the file and \(4, 3\) in the network"):
        comparison.add_outputs(outputs, [np.zeros((4, 3)), np.zeros((4, 1))], [None, None])
