"""Programs that torch.onnx takes without tracing them again, and those that it must."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from ul2q.exporters.onnx.direct_program import DirectProgram
from ul2q.exporters.onnx.export import export_float
from ul2q.pipeline.graph.capture import Captured, quiet
from ul2q.runtimes import onnxruntime as runtime

aten = torch.ops.aten


class Composed(nn.Module):
    """Operators with a plain form: reshapes, convolutions by words, an average, batch norms, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.valid = (
            nn.Conv2d(2, 4, (3, 5), padding="same", bias=False),
            nn.Conv2d(4, 4, 2, padding="valid"),
        )
        self.dilated = nn.Conv2d(4, 4, (2, 3), padding="same", dilation=(2, 1), groups=2)
        self.up, self.row = (
            nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, bias=False),
            nn.Conv1d(4, 4, 3, padding="same"),
        )
        self.norm, self.plain = nn.BatchNorm2d(4, momentum=None), nn.BatchNorm1d(4, affine=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(self.dilated(self.valid(self.same(x))))
        row = self.plain(self.row(x.flatten(2)))
        means = self.drop(F.adaptive_avg_pool2d(x, 1)).flatten(1)
        return (
            self.up(x),
            row.chunk(2, 1)[1].flatten(0, 1),
            means.unflatten(1, (2, 2)),
            self.drop(row.reshape(x.shape[0], -1)),
        )


def program(module: nn.Module, *inputs: Tensor) -> DirectProgram:
    shapes = tuple({0: Dim.DYNAMIC} for _ in inputs)
    with quiet():
        return DirectProgram(torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False))


def test_composed_operators_become_plain_ones_without_a_trace(randomise: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model, x = randomise(Composed()), torch.randn(3, 2, 6, 7)
    direct = program(model, x[:2])
    table = dict.fromkeys(torch.export.default_decompositions())
    assert direct.run_decompositions(table) is direct  # type: ignore[arg-type]
    assert {node.target for node in direct.graph.nodes if node.op == "call_function"} == {
        aten.batch_norm.default, aten.convolution.default, aten.mean.dim, aten.reshape.default,
        aten.split.Tensor, operator.getitem,
    }  # fmt: skip
    for ours, theirs in zip(direct.module()(x), model(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_their_file_computes_what_torch_does(randomise: Callable[[Any], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = randomise(Composed()), torch.randn(3, 2, 6, 7)
    captured = Captured(model, ("input",), ("up", "row", "means", "flat"))
    export_float(captured, [x]).save(tmp_path / "float.onnx")
    outputs = runtime.session(tmp_path / "float.onnx").run(None, {"input": x.numpy()})
    for ours, theirs in zip(outputs, model(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=1e-4, atol=1e-5)


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 1.0
        return y.add_(x)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 2, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.parametrize("module", [Overwriting(), Uneven()])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_what_has_no_plain_form_is_decomposed(module: nn.Module) -> None:
    direct, x = program(module, torch.randn(2, 1, 4, 4)), torch.randn(3, 1, 4, 4)
    with quiet():
        decomposed = direct.run_decompositions(torch.export.default_decompositions())
    assert decomposed is not direct
    called = {str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"}
    assert not called & {"aten.add_.Tensor", "aten.conv2d.padding"}
    torch.testing.assert_close(decomposed.module()(x), module(x))
