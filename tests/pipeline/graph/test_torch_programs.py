"""TorchScript and torch.export programs as networks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.torch_programs import from_exported
from ul2q.pipeline.importers.checkpoint import load_checkpoint
from ul2q.pipeline.importers.source import ModelSource

pytestmark = pytest.mark.usefixtures("measured_in_process")

X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
DYNAMIC = ({0: torch.export.Dim.DYNAMIC},)


class Net(nn.Module):
    """Padding by name, a batch norm, a grouped and a transposed convolution, a product with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.head = nn.Linear(4, 6)
        self.matrix = nn.Parameter(torch.randn(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        y = F.relu(self.up(self.grouped(y) + y))
        return F.relu(self.head(y.mean((2, 3)))) @ self.matrix


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def traced(model: nn.Module, path: Path) -> None:
    with quiet():
        torch.jit.save(torch.jit.trace(model, X[:2]), path)


def scripted(model: nn.Module, path: Path) -> None:
    with quiet():
        torch.jit.save(torch.jit.script(model), path)


def frozen(model: nn.Module, path: Path) -> None:
    with quiet():
        torch.jit.save(torch.jit.freeze(torch.jit.script(model)), path)


def exported(model: nn.Module, path: Path) -> None:
    torch.export.save(torch.export.export(model, (X[:2],), dynamic_shapes=DYNAMIC), path)


def decomposed(model: nn.Module, path: Path) -> None:
    with quiet():
        program = torch.export.export(model, (X[:2],), dynamic_shapes=DYNAMIC).run_decompositions()
        torch.export.save(program, path)


@pytest.fixture
def model(randomise: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    return randomise(Net())


@pytest.mark.parametrize("save", [traced, scripted, frozen, exported, decomposed])
def test_programs_have_their_layers_and_outputs(model: Any, tmp_path: Path, save: Any) -> None:
    path = tmp_path / "model.pt2"
    save(model, path)
    loaded = load_checkpoint(path, trust_pickle=True).model
    result = capture(loaded, [X[:1]])
    assert result.input_names == ("input",)
    with torch.no_grad():
        torch.testing.assert_close(result.module(X), model(X), rtol=1e-5, atol=1e-5)
    layers = {
        n: type(m) for n, m in result.module.named_modules() if isinstance(m, nn.Module) and "." not in n
    }
    kinds = {nn.Conv2d: 2, nn.ConvTranspose2d: 1, nn.Linear: 2}
    assert {kind: list(layers.values()).count(kind) for kind in kinds} == kinds
    if save is not frozen:  # whose tensors have no names
        names = {"conv": nn.Conv2d, "norm": nn.BatchNorm2d, "up": nn.ConvTranspose2d, "head": nn.Linear}
        assert {name: layers[name] for name in names} == names
        assert torch.equal(result.module.get_submodule("conv").weight, model.conv.weight)


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(traced, marks=pytest.mark.case("torchscript", outcome="trusted")),
        pytest.param(exported, marks=pytest.mark.case("pt2", outcome="trusted")),
    ],
)
def test_programs_are_compressed_if_trusted(model: Any, tmp_path: Path, save: Any) -> None:
    path = tmp_path / "model.pt"
    save(model, path)
    config = QuantConfig(wbits=4, epochs=1, samples=64, batch_size=64)
    with pytest.raises(UsageError, match=r"can run code when loaded: .* `arch`, or give `trust_pickle=True`"):
        compress_file(path, config, data="digits")
    report = compress_file(ModelSource(path, trust_pickle=True), config, data="digits").report
    rows = {row["name"]: row["quantized"] for row in report["layers"]}
    assert rows == dict.fromkeys(["conv", "grouped", "up", "head", "matrix_linear"], True)
    assert report["parity"]["onnxruntime"]["first_layer"] is None
    saved = torch.load(tmp_path / "model-w4a8" / "checkpoint.pt", weights_only=True)
    assert saved.keys() == model.state_dict().keys()
    assert not torch.equal(saved["conv.weight"], model.conv.weight)  # it was trained on


def test_layers_called_twice_are_one_layer(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.relu(self.conv(x)))

    exported(Twice().eval(), tmp_path / "model.pt2")
    result = capture(load_checkpoint(tmp_path / "model.pt2", trust_pickle=True).model, [X])
    assert [n.target for n in result.module.graph.nodes if n.op == "call_module"] == ["conv", "conv"]


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.reshape(int(x.shape[0]), 64))


def test_a_fixed_batch_size_is_refused(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Fixed().eval(), (X[:2],)), tmp_path / "model.pt2")
    loaded = load_checkpoint(tmp_path / "model.pt2", trust_pickle=True).model
    with pytest.raises(UsageError, match="fixes its batch size: export it with dynamic_shapes"):
        capture(loaded, [X])


def test_a_program_in_training_mode_is_refused(tmp_path: Path) -> None:
    exported(Net().train(), tmp_path / "model.pt2")
    with pytest.raises(UsageError, match=r"model\.pt2: it was exported in training mode"):
        load_checkpoint(tmp_path / "model.pt2", trust_pickle=True)


def test_batch_norms_without_running_statistics_are_no_training() -> None:
    norm = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten(), nn.Linear(64, 2)).eval()
    module = from_exported(torch.export.export(norm, (X,)))
    assert not module.training
    torch.testing.assert_close(module(X), norm(X))


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while bool(x.sum() > 1):
            x = x * 0.5
        return x


def test_scripts_without_a_translation_are_refused(tmp_path: Path) -> None:
    scripted(Loop(), tmp_path / "model.pt")
    loaded = load_checkpoint(tmp_path / "model.pt", trust_pickle=True).model
    with pytest.raises(UsageError, match=r"cannot be translated .*: give the checkpoint it was made from"):
        capture(loaded, [X])
