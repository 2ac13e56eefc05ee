"""One tensor under the names of two layers, of every pair of kinds: the file is valid and computes both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.importers.checkpoint import load_checkpoint
from ul2q.runtimes import onnxruntime as runtime

IDS = torch.randint(0, 30, (16, 5), generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 3, 6, 5, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Layers and the function that calls them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def language_model(function: Callable[[Any, Tensor], Tensor], *, head: bool = False) -> nn.Module:
    layers: dict[str, nn.Module] = {"emb": nn.Embedding(30, 8), "fc": nn.Linear(8, 8)}
    network = Network(function, **layers)
    if head:
        network.head = nn.Linear(8, 30, bias=False)
        network.head.weight = network.emb.weight
    return network


def with_head() -> nn.Module:
    return language_model(lambda s, x: s.head(F.relu(s.fc(s.emb(x)))), head=True)


def functional() -> nn.Module:
    return language_model(lambda s, x: F.linear(F.relu(s.fc(s.emb(x))), s.emb.weight))


def product() -> nn.Module:
    return language_model(lambda s, x: F.relu(s.fc(s.emb(x))) @ s.emb.weight.t())


def head_first() -> nn.Module:
    """The table belongs to the linear layer."""
    return Network(
        lambda s, x: s.head(F.relu(s.fc(F.embedding(x, s.head.weight)))),
        fc=nn.Linear(8, 8),
        head=nn.Linear(8, 30),
    )


def transposed() -> nn.Module:
    return Network(lambda s, x: F.linear(F.relu(s.enc(x)), s.enc.weight.t()), enc=nn.Linear(8, 4))


def convolutions() -> nn.Module:
    network = Network(
        lambda s, x: s.up(F.relu(s.down(x))),
        down=nn.Conv2d(3, 6, 3, padding=1),
        up=nn.ConvTranspose2d(6, 3, 3, padding=1),
    )
    network.up.weight = network.down.weight
    return network


def convolution_functional() -> nn.Module:
    return Network(
        lambda s, x: F.conv_transpose2d(F.relu(s.down(x)), s.down.weight, padding=1),
        down=nn.Conv2d(3, 6, 3, padding=1),
    )


def pointwise_and_linear() -> nn.Module:
    return Network(
        lambda s, x: F.linear(F.relu(s.point(x)).mean((2, 3)), s.point.weight.flatten(1)),
        point=nn.Conv2d(3, 3, 1),
    )


EMBEDDED = [with_head, functional, product, head_first]
CASES = [(make, IDS, 4) for make in EMBEDDED] + [(with_head, IDS, 1), (with_head, IDS, 8)]
CASES += [(transposed, ROWS, 4), (pointwise_and_linear, IMAGES, 4)]
CASES += [(convolutions, IMAGES, 2), (convolution_functional, IMAGES, 4)]


@pytest.mark.parametrize(("make", "inputs", "wbits"), CASES)
@pytest.mark.case("tied-embedding", "tied-transposed", outcome="works")
def test_the_file_computes_both_layers(make: Any, inputs: Tensor, wbits: int, deploy: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    deployment = deploy(model, [inputs], wbits=wbits)
    onnx.checker.check_model(onnx.load(deployment.path), full_check=True)
    assert deployment.verify().differing_codes == 0
    (actual,) = runtime.run(runtime.session(deployment.path), inputs.numpy()).values()
    with torch.no_grad():
        expected = model(inputs).numpy()
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < {1: 0.9, 2: 0.5, 4: 0.2, 8: 0.02}[wbits]


def test_a_tied_layer_of_a_program_from_a_file_is_not_called_unused(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(with_head().eval(), (IDS,)), tmp_path / "lm.pt2")
    notes = capture(load_checkpoint(tmp_path / "lm.pt2", trust_pickle=True).model, (IDS,)).notes
    assert [note for note in notes if "does not use" in note] == []


@pytest.mark.parametrize("make", EMBEDDED)
@pytest.mark.case("tied-embedding", outcome="works")
def test_an_embedding_keeps_the_float_table_and_says_so(make: Any, deploy: Any) -> None:
    torch.manual_seed(0)
    deployment = deploy(make().eval(), [IDS], wbits=2)
    table = deployment.captured.module.get_parameter(
        "emb.weight" if make is not head_first else "head_weight"
    )
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(deployment.path).graph.initializer}
    assert any(np.array_equal(a, table.detach().numpy()) for a in stored.values() if a.dtype == np.float32)
    layer = "head" if make in {with_head, head_first} else "emb_linear"
    assert deployment.captured.notes == (
        f"{layer}: embedding reads its weight, too: the file holds it twice",
    )
    assert {plan.name for plan in deployment.prepared.layers if plan.quantized} == {"fc", layer}
    # they stay one tensor for the fine-tuning
    original = deployment.prepared.module.get_submodule(layer).parametrizations.weight.original
    places = [
        p for n, p in deployment.prepared.module.named_parameters(remove_duplicate=False) if p is original
    ]
    assert len(places) == 2
