"""Linear layers that no integer operator reads: integer kernels, results in float, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.runtimes import onnxruntime as runtime


class Net(nn.Module):
    """A forward pass over named members."""

    def __init__(self, run: Callable[..., Any], **members: nn.Module) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def a_head() -> nn.Module:
    return Net(lambda s, x: s.head(F.relu(s.a(x))), a=nn.Linear(6, 90), head=nn.Linear(90, 70))


def tokens() -> nn.Module:
    def run(s: Any, x: Tensor) -> Any:
        return s.head(s.norm(s.a(x))), s.moved(x).transpose(1, 2).flatten(1)

    members = {"a": nn.Linear(6, 16), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 5)}
    return Net(run, **members, moved=nn.Linear(6, 4, bias=False))


def before_softmax() -> nn.Module:
    return Net(lambda s, x: torch.softmax(s.head(x), 1), head=nn.Linear(6, 5))


def read_twice() -> nn.Module:
    def run(s: Any, x: Tensor) -> Any:
        y = s.a(x)
        return y, s.head(F.relu(y))

    return Net(run, a=nn.Linear(6, 8), head=nn.Linear(8, 4))


def with_batch_norm() -> nn.Module:
    return Net(lambda s, x: s.norm(s.head(x)), head=nn.Linear(6, 5), norm=nn.BatchNorm1d(5))


#: network, shape of its input, layers whose result stays in float, sites, operators in float
NETWORKS: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str], list[str], tuple[str, ...]]
] = {
    "head": (a_head, (6,), ["head"], ["inputs_0", "a"], ()),
    "tokens": (tokens, (3, 6), ["a", "head", "moved"], ["inputs_0", "norm.layer_norm"], ("layer_norm",)),
    "softmax": (before_softmax, (6,), ["head"], ["inputs_0"], ("softmax",)),
    "read twice": (read_twice, (6,), ["head"], ["inputs_0", "a"], ()),
    "batch norm": (with_batch_norm, (6,), ["head"], ["inputs_0"], ()),
}


def made(name: str, randomise: Callable[[Any], Any]) -> tuple[nn.Module, list[Tensor]]:
    network, shape, *_ = NETWORKS[name]
    torch.manual_seed(0)
    return randomise(network()), [torch.randn(24, *shape)]


def names(prepared: Prepared) -> list[str]:
    return [result.name for result in prepared.float_results]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("k", "granularity"), [(2, "tensor"), (8, "channel")])
def test_the_file_gives_the_results_of_torch_bit_for_bit(
    deploy: Any, randomise: Callable[[Any], Any], name: str, k: int, granularity: str
) -> None:
    network, inputs = made(name, randomise)
    *_, in_float, sites, float_operators = NETWORKS[name]
    deployment = deploy(network, inputs, wbits=k, granularity=granularity)
    assert names(deployment.prepared) == in_float
    assert [site.name for site in deployment.prepared.sites] == sites
    assert deployment.lowered.float_operators == float_operators
    assert {p.name for p in deployment.prepared.layers if p.on_integers} == set(deployment.lowered.weights)
    parity = deployment.verify()
    assert parity.differing_codes == 0
    if not float_operators:
        assert (parity.max_abs, parity.accurate.max_abs) == (0, 0)
    linear = len(deployment.lowered.weights)
    assert runtime.operators(deployment.path)["QGemm"] == linear


@pytest.mark.parametrize("name", ["tokens", "softmax"])
def test_what_float_operators_read_is_bit_for_bit_too(
    deploy: Any, randomise: Callable[[Any], Any], name: str
) -> None:
    network, inputs = made(name, randomise)
    deployment = deploy(network, inputs, wbits=4)
    layer = {"tokens": "a", "softmax": "head"}[name]
    seen: list[Tensor] = []
    module = deployment.lowered.module.get_submodule(layer)
    handle = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    deployment.lowered.module(*inputs)
    handle.remove()
    model, _ = runtime.with_outputs(deployment.path, [f"{layer}/Gemm"])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (values,) = session.run([f"{layer}/Gemm"], {session.get_inputs()[0].name: inputs[0].numpy()})
    np.testing.assert_array_equal(values, seen[0].reshape(values.shape).numpy())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("options", [{"step": "paper"}, {"abits": 32}])
def test_as_published_and_with_float_activations_nothing_changes(
    randomise: Callable[[Any], Any], name: str, options: dict[str, Any]
) -> None:
    network, inputs = made(name, randomise)
    result = prepare(capture(network, inputs), QuantConfig(wbits=2, **options))
    assert names(result) == []
    rounded = {site.name for site in result.sites}
    assert (set(NETWORKS[name][2]) <= rounded) == (options != {"abits": 32})


def reader(run: Callable[[Any, Tensor], Any], **members: nn.Module) -> list[str]:
    """Return whether the layer ``a`` stays in float where ``run`` reads it."""
    torch.manual_seed(0)
    net = Net(lambda s, x: run(s, s.a(x)), a=nn.Linear(6, 6), **members)
    return [n for n in names(prepare(capture(net, [torch.randn(2, 6)]), QuantConfig(wbits=2))) if n == "a"]


READERS: list[tuple[Callable[[Any, Tensor], Any], list[str]]] = [
    (lambda _, y: y, ["a"]),
    (lambda _, y: y.unsqueeze(1)[:, :, 1:], ["a"]),
    (lambda _, y: torch.tanh(y), ["a"]),
    (lambda _, y: y * 2, ["a"]),
    (lambda _, y: F.relu(y), []),
    (lambda _, y: F.hardtanh(y), []),
    (lambda _, y: torch.sigmoid(y), []),
    (lambda _, y: y + y, []),
    (lambda s, y: s.b(y), []),
    (lambda s, y: (y, s.b(y.unsqueeze(1)[:, 0])), []),
]


@pytest.mark.parametrize(("run", "expected"), READERS)
def test_a_result_is_rounded_where_an_operator_on_codes_reads_it(
    run: Callable[[Any, Tensor], Any], expected: list[str]
) -> None:
    assert reader(run, b=nn.Linear(6, 2)) == expected


def test_outputs_are_nearer_to_the_float_network_than_rounded_ones(deploy: Any) -> None:
    torch.manual_seed(0)
    network = a_head().eval()
    inputs = [torch.randn(256, 6)]
    deployment = deploy(network, inputs, wbits=8, granularity="channel", epochs=0)
    with torch.no_grad():
        reference, outputs = network(*inputs), deployment.lowered.module(*inputs)
    step = (outputs.max().clamp(min=0) - outputs.min().clamp(max=0)) / 255
    rounded = torch.round(outputs / step) * step
    error, error_of_rounded = ((y - reference).norm() / reference.norm() for y in (outputs, rounded))
    assert error < 0.9 * error_of_rounded


def test_a_caller_may_keep_the_rounding_of_a_layer() -> None:
    torch.manual_seed(0)
    captured = capture(a_head(), [torch.randn(2, 6)])
    result = prepare(captured, QuantConfig(wbits=2), lambda name: name == "head")
    assert names(result) == []
    assert result.sites[-1].name == "head"
