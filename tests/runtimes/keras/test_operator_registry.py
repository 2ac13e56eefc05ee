"""Every operator of the registry has torch, ONNX and Keras forms, which give the codes of its reference."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras

from ul2q.exporters.onnx.operator_translations import ONNX_FORMS, TRANSLATIONS, WEIGHTED_FORMS
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture, quiet
from ul2q.pipeline.graph.integer_modules import IntegerFunction
from ul2q.pipeline.graph.lower import lower
from ul2q.pipeline.graph.operators.activation_chains import CHAINS, WITHOUT_CHAIN, expand
from ul2q.pipeline.graph.operators.definition import CodeFormat, Example, IntegerOperator
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS, WEIGHTED_OPERATORS, integer_operator
from ul2q.pipeline.graph.prepare import prepare
from ul2q.pipeline.graph.torch_kernels import call_torch
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras.codes import channels_first, channels_last
from ul2q.runtimes.keras.layers.registry import KERAS_FORMS, WITHOUT_KERAS

EXAMPLES = [
    pytest.param(operator, example, id=f"{operator.name}{i}")
    for operator in INTEGER_OPERATORS.values()
    for i, example in enumerate(operator.examples)
]


def draw(example: Example, seed: int) -> tuple[list[np.ndarray], list[CodeFormat], CodeFormat]:
    """Draw codes and formats of all operands, and the format of the result."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, 256, shape).astype(np.uint8) for shape in example.shapes]
    scales = rng.uniform(0.01, 0.05, len(codes) + 1).astype(np.float32)
    formats = [
        CodeFormat(float(s), int(z)) for s, z in zip(scales, rng.integers(100, 156, len(scales)), strict=True)
    ]
    return codes, formats[:-1], formats[-1]


def test_the_page_of_the_operators_is_up_to_date() -> None:
    page = runpy.run_path(str(Path(__file__).parents[2] / "operators_table.py"))
    assert page["main"](["--check"]) == 0, "python tests/operators_table.py"


def test_no_activation_is_listed_as_float_that_is_a_chain() -> None:
    names = {
        target.removeprefix("aten.").removesuffix(".default")
        for op in INTEGER_OPERATORS.values()
        for target in op.targets
    }
    assert not WITHOUT_CHAIN.keys() & (CHAINS.keys() | names)


def test_no_form_is_missing() -> None:
    names = set(INTEGER_OPERATORS)
    assert names - set(ONNX_FORMS) == set(), (
        "operators without an ONNX form (operator_translations.ONNX_FORMS)"
    )
    without = names - set(KERAS_FORMS) - set(WITHOUT_KERAS)
    assert without == set(), "operators without a Keras form (keras.layers.registry.KERAS_FORMS) or a reason"
    on_integers = {name for name, layer in WEIGHTED_OPERATORS.items() if layer.on_integers}
    assert on_integers - set(WEIGHTED_FORMS) == set(), "layers without an ONNX form"
    assert {*ONNX_FORMS, *KERAS_FORMS, *WITHOUT_KERAS} <= names, "forms of operators that are not registered"


@pytest.mark.parametrize(("operator", "example"), EXAMPLES)
def test_torch_gives_the_codes_of_the_reference(operator: IntegerOperator, example: Example) -> None:
    codes, sources, out = draw(example, seed=0)
    expected = operator.reference(codes, sources, out, **example.parameters)
    module = IntegerFunction(operator, sources, out, example.parameters)
    np.testing.assert_array_equal(module(*map(torch.from_numpy, codes)).numpy(), expected)


@pytest.mark.parametrize(("operator", "example"), EXAMPLES)
def test_reference_is_the_rounded_float_function(operator: IntegerOperator, example: Example) -> None:
    """The float function of the real values, rounded, is at most one step away."""
    codes, sources, out = draw(example, seed=1)
    real = [
        torch.from_numpy(s.scale * (c.astype(np.float32) - s.zero_point))
        for c, s in zip(codes, sources, strict=True)
    ]
    value = operator.float_form(call_torch, *real, **example.parameters).numpy()
    expected = np.clip(np.round(value / out.scale) + out.zero_point, 0, 255)
    result = operator.reference(codes, sources, out, **example.parameters)
    assert np.abs(result.astype(int) - expected).max() <= 1
    assert np.ptp(result) > 0


@pytest.mark.parametrize(("operator", "example"), EXAMPLES)
def test_onnx_runtime_gives_the_codes_of_the_reference(
    operator: IntegerOperator, example: Example, tmp_path: Path
) -> None:
    codes, sources, out = draw(example, seed=2)
    expected = operator.reference(codes, sources, out, **example.parameters)
    inputs = tuple(map(torch.from_numpy, codes))
    module = IntegerFunction(operator, sources, out, example.parameters)
    with quiet():
        program = torch.export.export(module, inputs, strict=False)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            optimize=True,
            opset_version=21,
            custom_translation_table=TRANSLATIONS,
        )
    path = tmp_path / "operator.onnx"
    exported.save(path)  # type: ignore[union-attr]
    live = runtime.session(path)
    feeds = dict(zip([spec.name for spec in live.get_inputs()], codes, strict=True))
    (result,) = live.run(None, feeds)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("operator", "example"), EXAMPLES)
def test_keras_gives_the_codes_of_the_reference(operator: IntegerOperator, example: Example) -> None:
    if operator.name in WITHOUT_KERAS:
        pytest.skip(WITHOUT_KERAS[operator.name])
    codes, sources, out = draw(example, seed=3)
    expected = operator.reference(codes, sources, out, **example.parameters)
    real = [
        channels_last(np.float32(s.scale) * (c.astype(np.float32) - np.float32(s.zero_point)))
        for c, s in zip(codes, sources, strict=True)
    ]
    if len(codes) == 2 and operator.swaps(*(c.shape for c in codes)):
        real.reverse()
        sources = sources[::-1]
    rank = codes[0].ndim
    layer = KERAS_FORMS[operator.name].frozen(
        example.parameters, rank, sources=sources, out=out, dtype="float32"
    )
    value = layer(real if len(real) > 1 else real[0])
    y = channels_first(np.asarray(keras.ops.convert_to_numpy(value)))
    np.testing.assert_array_equal(np.round(y / np.float32(out.scale)) + out.zero_point, expected)


@pytest.mark.parametrize(("operator", "example"), EXAMPLES)
def test_a_captured_network_is_recognised(operator: IntegerOperator, example: Example) -> None:
    """What float_form builds is recognised in a captured graph, with the same operands and parameters."""

    class Network(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            value: Tensor = operator.float_form(call_torch, *x, **example.parameters)
            return value

    batched = [torch.rand(shape if shape[0] > 1 else (2, *shape[1:])) for shape in example.shapes]
    graph = capture(Network(), batched).module.graph
    matches = [match for node in graph.nodes if (match := integer_operator(node)) is not None]
    assert [(match.name, dict(parameters)) for match, parameters in matches] == [
        (operator.name, dict(example.parameters))
    ]


@pytest.mark.parametrize("name", CHAINS)
def test_chains_compute_the_activation(name: str) -> None:
    function = getattr(torch.nn.functional, name, None) or getattr(torch, name)

    def apply(part: str, *operands: Any) -> Any:
        if part == "clamp":
            return torch.clamp(*operands)
        return INTEGER_OPERATORS[part].float_form(call_torch, *operands)

    x = torch.linspace(-8, 8, 1001)
    torch.testing.assert_close(expand(CHAINS[name], x, apply), function(x))


@pytest.mark.parametrize("name", CHAINS)
def test_chains_run_on_integers_where_the_input_has_codes(name: str) -> None:
    function = getattr(torch.nn.functional, name, None) or getattr(torch, name)
    network = nn.Sequential(nn.Linear(3, 3), Activation(function), nn.Linear(3, 2), Activation(function))
    prepared = prepare(capture(network, [torch.rand(2, 3)]), QuantConfig(wbits=4))
    assert f"aten.{name}.default" not in [str(node.target) for node in prepared.module.graph.nodes]
    assert lower(prepared).float_operators == ()


class Activation(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.function(x)
        return value
