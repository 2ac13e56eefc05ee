"""Capture: the same layers under the same names, the same numbers, the same training; and clear refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import Captured, capture, copy_graph


class Net(nn.Module):
    """Layers by name, and a forward pass that is given the network."""

    def __init__(self, run: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        for name, value in members.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def conv(inputs: int, outputs: int, kernel: Any = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **options)


def residual() -> Net:
    """In-place operations on values that are still used, by name and by alias."""

    def run(s: Any, x: Tensor) -> Tensor:
        a = s.relu(s.bn(s.conv1(x)))
        b = a.view(a.shape[0], 4, -1)
        y = s.conv2(a)
        y += a
        b = b * 2
        y.clamp_(max=2)
        a[:, :1].mul_(0.5)
        return s.relu(y) + a + b.view_as(a)

    return Net(
        run, conv1=conv(3, 4, padding=1, bias=False), bn=nn.BatchNorm2d(4), conv2=conv(4, 4, padding=1),
        relu=nn.ReLU(inplace=True),
    )  # fmt: skip


def activations() -> Net:
    def run(s: Any, x: Tensor) -> Tensor:
        x = F.relu6(s.conv1(F.relu(x)))
        x = s.prelu(F.leaky_relu(torch.relu(s.conv2(x)), 0.1))
        return torch.sigmoid(F.hardswish(F.silu(F.gelu(x))))

    return Net(run, conv1=conv(3, 4), conv2=conv(4, 4), prelu=nn.PReLU(4))


def convolutions() -> Net:
    layers = {
        "depthwise": conv(3, 6, groups=3, bias=False),
        "grouped": conv(6, 4, (1, 3), groups=2, dilation=(1, 2), stride=(2, 1), padding=(2, 1)),
        "same": conv(4, 4, (3, 5), padding="same", dilation=(1, 2)),
        "valid": conv(4, 4, 2, padding="valid"),
        "reflect": conv(4, 4, padding=1, padding_mode="reflect"),
        "up": nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1, groups=2),
    }
    return Net(lambda s, x: nn.Sequential(*(s.get_submodule(n) for n in layers))(x), **layers)


def dimensions() -> Net:
    def run(s: Any, x: Tensor) -> Tensor:
        line = s.bn(s.line(x.flatten(2)))
        line = s.up(line)
        return s.volume(line.unflatten(2, (2, 2, -1)))

    return Net(
        run, line=nn.Conv1d(3, 4, 3, padding="same"), bn=nn.BatchNorm1d(4), up=nn.ConvTranspose1d(4, 4, 2, 2),
        volume=nn.Conv3d(4, 2, (2, 1, 3)),
    )  # fmt: skip


def batch_norms() -> Net:
    def run(s: Any, x: Tensor) -> Tensor:
        x = s.conv(s.first(x))
        x = s.plain(x) + s.batch(x) + s.average(x)
        return s.after(s.fc(x.mean((2, 3))))

    return Net(
        run, first=nn.BatchNorm2d(3), conv=conv(3, 4), plain=nn.BatchNorm2d(4, affine=False),
        batch=nn.BatchNorm2d(4, track_running_stats=False), average=nn.BatchNorm2d(4, momentum=None),
        fc=nn.Linear(4, 5), after=nn.BatchNorm1d(5),
    )  # fmt: skip


def gates() -> Net:
    def run(s: Any, x: Tensor) -> Any:
        x = s.body(x)
        x = x * torch.sigmoid(s.expand(F.relu(s.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = torch.cat([torch.cat([x]), x + x, F.pixel_shuffle(x, 2)[:, :, :6, :6]], 1)
        a, b = x.split([2, 7], 1)
        return s.head(b.permute(0, 2, 3, 1).reshape(b.shape[0], 36, 7)), a.chunk(2, 1)

    return Net(
        run, body=conv(3, 4), squeeze=conv(4, 2, 1), expand=conv(2, 4, 1), head=nn.Linear(7, 3),
    )  # fmt: skip


def attention() -> Net:
    def run(s: Any, x: Tensor) -> Tensor:
        x = s.patches(x).flatten(2).transpose(1, 2) + s.position
        h = s.norm(x)
        x = x + s.attention(h, h, h, need_weights=False)[0]
        return s.group(s.head(x.mean(1)))

    return Net(
        run,
        patches=conv(3, 8, 4, stride=4),
        position=nn.Parameter(torch.randn(1, 4, 8)),
        norm=nn.LayerNorm(8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 4),
        group=nn.GroupNorm(2, 4),
    )


def nested() -> Net:
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5))
    tied = nn.Linear(6, 6)
    tied.weight = block[0].weight
    return Net(
        lambda s, x: s.tied(s.blocks["a"](s.blocks["a"](x))), blocks=nn.ModuleDict({"a": block}), tied=tied
    )


IMAGE = (3, 8, 8)
KINDS: dict[str, tuple[Callable[[], Net], tuple[tuple[int, ...], ...]]] = {
    "residual": (residual, (IMAGE,)),
    "activations": (activations, (IMAGE,)),
    "convolutions": (convolutions, (IMAGE,)),
    "dimensions": (dimensions, (IMAGE,)),
    "batch_norms": (batch_norms, (IMAGE,)),
    "gates": (gates, (IMAGE,)),
    "attention": (attention, (IMAGE,)),
    "nested": (nested, ((6,),)),
    "lstm": (
        lambda: Net(
            lambda s, x: s.head(s.gru(s.lstm(x)[0])[1][-1]),
            lstm=nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True),
            gru=nn.GRU(8, 5, batch_first=True),
            head=nn.Linear(5, 3),
        ),
        ((7, 6),),
    ),
    "two inputs, a dict": (
        lambda: Net(
            lambda s, a, b: {"sum": s.a(a) + s.b(b), "parts": (a, [s.a(a)], None), "constant": s.weight},
            a=nn.Linear(4, 3),
            b=nn.Linear(5, 3, bias=False),
            weight=nn.Parameter(torch.ones(2)),
        ),
        ((4,), (5,)),
    ),
}


def examples(name: str, batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [torch.randn(batch, *shape, generator=generator) for shape in KINDS[name][1]]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, randomise: Callable[[Any], Any]) -> tuple[str, nn.Module, Captured]:
    torch.manual_seed(0)
    model = randomise(KINDS[request.param][0]())
    return request.param, model, capture(model, examples(request.param, 1))


def equal(a: Any, b: Any) -> bool:
    leaves, spec = torch.utils._pytree.tree_flatten(a)
    others, other_spec = torch.utils._pytree.tree_flatten(b)
    pairs = zip(leaves, others, strict=True)
    same = (torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)
    return str(spec) == str(other_spec) and all(same)


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.case(
    "inplace-relu",
    "shared-relu",
    "functional-relu",
    "relu6",
    "prelu",
    "reused-layer",
    "tied-weights",
    "other-batch",
    "two-inputs",
    "dict-output",
    "several-outputs",
    outcome="works",
)
def test_outputs_are_equal_bit_for_bit(case: tuple[str, nn.Module, Captured], batch: int) -> None:
    name, model, captured = case
    inputs = examples(name, batch)
    copies = [x.clone() for x in inputs]
    # With gradients: without, nn.MultiheadAttention takes a path of its own, which rounds differently.
    assert equal(captured.module(*inputs), model(*copies))
    assert equal(inputs, copies)  # no input is overwritten


def test_names_and_tensors_are_those_of_the_model(case: tuple[str, nn.Module, Captured]) -> None:
    _, model, captured = case
    own, theirs = captured.module.state_dict(), model.state_dict()
    # Attention's projections become layers of their own.
    names = {
        name.replace("in_proj_weight", "in_proj.weight").replace("in_proj_bias", "in_proj.bias"): tensor
        for name, tensor in theirs.items()
    }
    missing = {name for name in names if name not in own and "num_batches" not in name}
    assert missing == set()
    assert set(own) <= set(names)
    assert all(torch.equal(tensor, names[name]) for name, tensor in own.items())


def layers_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, str]:
    return {n: type(m).__name__ for n, m in module.named_modules() if isinstance(m, kinds)}


def test_layers_are_modules_again(case: tuple[str, nn.Module, Captured]) -> None:
    name, model, captured = case
    kinds = (
        nn.Linear,
        nn.modules.conv._ConvNd,
        nn.modules.batchnorm._BatchNorm,
        nn.modules.dropout._DropoutNd,
    )
    expected = layers_of(model, kinds)
    expected.pop(
        "batch", None
    )  # normalises with the statistics of its own batch, in eval mode too: an operator
    if name == "attention":
        expected |= {"attention.in_proj": "Linear", "attention.out_proj": "Linear"}
    assert layers_of(captured.module, kinds) == expected
    # Nothing with weights is left as an operator, but for what has no layer here.
    left = {
        str(n.target).split(".")[1]
        for n in captured.module.graph.nodes
        if n.op == "call_function" and any(i.op == "get_attr" for i in n.all_input_nodes)
    }
    assert left == {
        "activations": {"prelu"}, "attention": {"add", "layer_norm", "group_norm"},
        "batch_norms": {"_native_batch_norm_legit"}, "lstm": {"lstm", "gru"},
    }.get(name, set())  # fmt: skip


@pytest.mark.case("reused-layer", outcome="works")
def test_a_module_called_twice_is_one_module_with_two_calls() -> None:
    torch.manual_seed(0)
    alias = nn.Linear(4, 4)
    model = Net(lambda s, x: s.c(s.b(s.a(s.a(x)))), a=alias, b=alias, c=nn.Linear(4, 4))
    captured = capture(model, [torch.randn(2, 4)]).module
    calls = [str(n.target) for n in captured.graph.nodes if n.op == "call_module"]
    assert calls == ["a", "a", "a", "c"]
    assert set(captured.state_dict()) == {"a.weight", "a.bias", "c.weight", "c.bias"}


@pytest.mark.case("tied-weights", outcome="works")
def test_tied_weights_stay_tied_and_apart_from_the_model() -> None:
    torch.manual_seed(0)
    model = nested()
    captured = capture(model, [torch.randn(2, 6)]).module
    weights = [captured.get_parameter("blocks.a.0.weight"), captured.get_parameter("tied.weight")]
    assert weights[0] is weights[1]
    assert captured.get_parameter("tied.bias") is not captured.get_parameter("blocks.a.0.bias")
    weights[0].data.zero_()
    assert model.tied.weight.count_nonzero() == 36


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5]))
        self.conv, self.head = nn.Conv2d(1, 8, 3, 2, 1), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x - self.mean[:, None, None])).flatten(1))


def test_a_graph_runs_on_inputs_with_any_strides() -> None:
    """One channel: the strides of a sample may be those of channels in the last place."""
    torch.manual_seed(0)
    model, captured = Normalised().eval(), capture(Normalised().eval(), [torch.randn(2, 1, 8, 8)])
    captured.module.load_state_dict(model.state_dict())
    for batch in (1, 3):
        x = torch.randn(batch, 8, 8, 1).permute(0, 3, 1, 2)
        assert torch.equal(captured.module(x), model(x))


def test_computed_weights_are_folded_and_named_in_a_note() -> None:
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.weight_norm(conv(3, 4))
    model = Net(
        lambda s, x: F.conv2d(F.relu(s.norm(x)), s.mask * s.masked.weight, s.masked.bias), norm=norm,
        masked=conv(4, 2), mask=torch.tensor(0.5),
    )  # fmt: skip
    x = torch.randn(2, *IMAGE)
    captured = capture(model, [x])
    assert captured.notes == (
        "norm: its computed weight was folded into a plain weight",
        "masked: its computed weight was folded into a plain weight",
    )
    assert torch.equal(captured.module.get_parameter("norm.weight"), norm.weight)
    assert torch.equal(captured.module.get_parameter("masked.weight"), 0.5 * model.masked.weight)
    assert torch.allclose(captured.module(x), model(x), atol=1e-6)


def test_a_weight_that_depends_on_the_input_stays_an_operator() -> None:
    model = Net(lambda s, x: F.linear(x, s.fc.weight * x.abs().max()), fc=nn.Linear(4, 3))
    captured = capture(model, [torch.randn(2, 4)])
    assert captured.notes == (
        "fc.bias: the forward pass does not use it; it is left out",
        "linear: its weight is computed from the input",
    )


@pytest.mark.case("unused-layer", outcome="works")
def test_unused_layers_are_left_out_and_named() -> None:
    model = Net(
        lambda s, x: s.used(x), used=nn.Linear(4, 3), spare=nn.Sequential(conv(1, 1), nn.Linear(2, 2))
    )
    captured = capture(model, [torch.randn(2, 4)])
    assert captured.notes == tuple(
        f"spare.{i}: the forward pass does not use it; it is left out" for i in (0, 1)
    )
    assert set(captured.module.state_dict()) == {"used.weight", "used.bias"}


# Training


def train(module: nn.Module, steps: int = 3) -> dict[str, Any]:
    """Train on fixed data; the state must not depend on anything but the module."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    module.train()
    losses = []
    for step in range(steps):
        x = torch.randn(6, *IMAGE, generator=torch.Generator().manual_seed(step))
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "state": dict(sorted(module.state_dict().items()))}


def trainable() -> Net:
    def run(s: Any, x: Tensor) -> Tensor:
        x = s.drop(s.relu(s.bn1(s.conv1(x))))
        x = s.spatial(s.relu(s.bn2(s.conv2(x)) + x))
        x = F.dropout(x.mean((2, 3)), 0.3, s.training)
        return s.bn3(s.fc(x))

    return Net(
        run, conv1=conv(3, 4, padding=1, bias=False), bn1=nn.BatchNorm2d(4), relu=nn.ReLU(inplace=True),
        drop=nn.Dropout(0.2), conv2=conv(4, 4, padding=1), bn2=nn.BatchNorm2d(4, momentum=None),
        spatial=nn.Dropout2d(0.4), fc=nn.Linear(4, 5), bn3=nn.BatchNorm1d(5, momentum=0.3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, Any], nn.Module]:
    """A model that has seen batches, and its captured graph."""
    torch.manual_seed(0)
    model = trainable()
    train(model)  # a cumulative average depends on the batches seen before
    captured = capture(model, [torch.randn(1, *IMAGE)]).module
    return train(model), captured


def test_training_the_graph_equals_training_the_model(trained: tuple[dict[str, Any], nn.Module]) -> None:
    expected, captured = trained
    actual = train(copy_graph(captured))
    assert equal(actual["losses"], expected["losses"])
    assert actual["state"].keys() == expected["state"].keys()
    differing = [k for k, v in expected["state"].items() if not torch.equal(actual["state"][k], v)]
    assert differing == []


def test_dropout_and_momentum_keep_their_settings(trained: tuple[dict[str, Any], nn.Module]) -> None:
    modules = dict(trained[1].named_modules())
    dropouts = {n: (type(m), m.p) for n, m in modules.items() if isinstance(m, nn.modules.dropout._DropoutNd)}
    assert dropouts == {
        "drop": (nn.Dropout, 0.2), "spatial": (nn.Dropout2d, 0.4), "dropout": (nn.Dropout, 0.3),
    }  # fmt: skip
    assert [modules[f"bn{i}"].momentum for i in (1, 2, 3)] == [0.1, None, 0.3]
    x = torch.ones(4, *IMAGE)
    module = trained[1].eval()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_the_model_is_left_untouched() -> None:
    torch.manual_seed(0)
    model = trainable()
    model.train()
    model.bn1.eval()  # frozen on its own
    seen: list[str] = []
    handle = model.conv1.register_forward_hook(lambda *_: seen.append("hook"))
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    captured = capture(model, [torch.randn(2, *IMAGE)]).module
    assert [m.training for m in model.modules()] == modes
    assert equal(dict(model.state_dict()), dict(before))
    assert not captured.training
    train(captured)
    assert equal(dict(model.state_dict()), dict(before))
    assert all(p.grad is None for p in model.parameters())
    seen.clear()
    model(torch.randn(2, *IMAGE))
    assert seen == ["hook"]
    handle.remove()


def test_hooks_fire_on_captured_layers_called_twice() -> None:
    captured = capture(nested(), [torch.randn(2, 6)]).module
    seen: list[torch.Size] = []
    captured.get_submodule("blocks.a.0").register_forward_hook(lambda _m, _x, y: seen.append(y.shape))
    captured(torch.randn(3, 6))
    assert seen == [torch.Size([3, 6])] * 2


# Refusals


def data_dependent(s: Any, x: Tensor) -> Tensor:
    y = s.fc(x)
    return y * 2 if y.sum() > 0 else y


def failing(s: Any, x: Tensor) -> Tensor:
    return x * {"other key": s}["no such key"]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda s, x: s.fc(x) * 2 if x.shape[0] > 1 else s.fc(x),
            "differs from the model at batch 1: its code",
        ),
        (lambda s, x: torch.stack([s.fc(y) for y in x]), "makes the batch size a number"),
        (lambda s, x: torch.stack([s.fc(x[i]) for i in range(2)]), "does not run at batch 1"),
        (lambda s, x: s.fc(x).view(2, -1), "makes the batch size a number"),
        (lambda s, x: s.fc(x).view(len(x), -1), "makes the batch size a number"),
        (lambda s, x: s.fc(x) + torch.rand(1), "or on chance"),
        (lambda s, x: torch.from_numpy(s.fc(x).detach().numpy()), "torch.export cannot capture this model"),
        (data_dependent, "control flow that depends on data"),
        (failing, "does not run on inputs of float32 [2, 4]: 'no such key'"),
    ],
)
@pytest.mark.case("data-dependent", "other-batch", outcome="refused")
def test_what_cannot_be_captured_is_refused_in_one_line(
    run: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        capture(Net(run, fc=nn.Linear(4, 3)), [torch.randn(2, 4)])
    assert message in str(refused.value)
    assert str(refused.value).startswith("Net")
    assert len(str(refused.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")  # torch's own pages of explanation stay away


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.randn(2, 5), "Net does not run on inputs of float32 [2, 5]: mat1 and mat2 shapes"),
        (torch.randn(2, 4).half(), "Net does not run on inputs of float16 [2, 4]: "),
        (torch.zeros(2, 4, dtype=torch.uint8), "Net does not run on inputs of uint8 [2, 4]: "),
    ],
)
@pytest.mark.case("other-size", outcome="refused")
def test_inputs_that_the_model_does_not_take_are_named(example: Tensor, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        capture(Net(lambda s, x: s.fc(x), fc=nn.Linear(4, 3)), [example])
    assert str(refused.value).startswith(message)


def test_names_that_fx_needs_are_refused() -> None:
    with pytest.raises(UsageError, match="keeps the name code, meta for itself: rename it"):
        capture(
            Net(lambda s, x: s.meta(s.code(x)), code=nn.Linear(4, 4), meta=nn.Linear(4, 4)),
            [torch.ones(2, 4)],
        )
