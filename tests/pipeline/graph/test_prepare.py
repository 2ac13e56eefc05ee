"""Where quantisers stand, and what the plan says of every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.compression.calibrate import set_activations
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.pipeline.graph.prepare import Prepared, prepare


class Net(nn.Module):
    """A forward pass over named layers: 1x1 convolutions of 4 channels unless given."""

    def __init__(self, run: Callable[..., Any], names: str = "", **members: Any) -> None:
        super().__init__()
        for name in names.split():
            setattr(self, name, nn.Conv2d(4, 4, 1))
        for name, value in members.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def prepared(run: Callable[..., Any], names: str = "", options: Any = None, **members: Any) -> Prepared:
    torch.manual_seed(0)
    config = QuantConfig(wbits=2, **(options or {}))
    return prepare(capture(Net(run, names, **members), [X]), config)


def sites(result: Prepared) -> dict[str, str]:
    """Return the operator in front of each site: what is rounded there."""
    nodes = {node.name: node for node in result.module.graph.nodes}
    names = {}
    for site in result.sites:
        (source,) = nodes[site.node].all_input_nodes
        target = getattr(source.target, "__name__", source.target)
        names[site.name] = str(target).removesuffix(".default")
    return names


def clips(result: Prepared) -> dict[str, Any]:
    return {site.name: quantizer.clip for site, quantizer in result.quantizers()}


def test_clamps_and_batch_norms_are_fused_in_front_of_the_site() -> None:
    result = prepared(
        lambda s, x: s.d(F.hardtanh(s.c(F.relu6(s.bn(s.b(F.relu(s.a(x)))))))), "a b c d", bn=nn.BatchNorm2d(4)
    )
    assert sites(result) == {"inputs_0": "inputs_0", "a": "relu", "b": "relu6", "c": "hardtanh", "d": "d"}
    assert clips(result) == {
        "inputs_0": None, "a": (0.0, float("inf")), "b": (0.0, 6.0), "c": (-1.0, 1.0), "d": None,
    }  # fmt: skip
    assert [(s.anchor, s.batch_norm) for s in result.sites] == [
        (None, None), ("a", None), ("b", "bn"), ("c", None), ("d", None),
    ]  # fmt: skip


def test_a_value_that_is_read_before_the_clamp_is_rounded_before_it() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y, z = s.a(x), s.norm(s.b(x))
        return F.relu(y) + y + F.relu(z) + z

    # ReLU works on the codes then, so that it needs no site of its own.
    result = prepared(run, "a b", norm=nn.BatchNorm2d(4))
    assert sites(result) == {
        "inputs_0": "inputs_0", "a": "a", "b": "norm", "add": "add.Tensor", "add__2": "add.Tensor",
        "add__3": "add.Tensor",
    }  # fmt: skip


def test_a_batch_norm_whose_layer_is_read_elsewhere_has_a_site_of_its_own() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        return s.b(s.norm(y)) + y

    result = prepared(run, "a b", norm=nn.BatchNorm2d(4))
    assert sites(result) == {
        "inputs_0": "inputs_0", "a": "a", "norm": "norm", "b": "b", "add": "add.Tensor",
    }  # fmt: skip
    plan = {layer.name: (layer.quantized, layer.reason) for layer in result.layers}
    assert plan["norm"] == (False, None)  # on integers, with its parameters as they are


def test_integer_operators_have_sites_and_moving_ones_have_none() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = s.drop(F.max_pool2d(s.a(x), 2))
        y = torch.cat([y, y.permute(0, 1, 3, 2).contiguous()], 1)
        p, q = y.chunk(2, 1)
        y = F.interpolate(F.pixel_shuffle(p * q, 2), scale_factor=2)[:, :, 1:7].expand(-1, 4, -1, -1)
        y = F.relu(y + s.b(y))
        return s.head(F.adaptive_avg_pool2d(y, 1).flatten(1).unsqueeze(1).squeeze(1))

    result = prepared(run, "a b", drop=nn.Dropout(), head=nn.Linear(4, 3))
    assert sites(result) == {
        "inputs_0": "inputs_0", "a": "a", "cat": "cat", "mul": "mul.Tensor", "b": "b", "add": "relu",
        "adaptive_avg_pool2d": "adaptive_avg_pool2d",
    }  # fmt: skip
    assert [layer.name for layer in result.float_results] == ["head"]


@pytest.mark.case("silu", outcome="works")
def test_an_activation_that_is_a_chain_has_a_site_for_each_part() -> None:
    result = prepared(lambda s, x: s.b(F.silu(s.a(x))), "a b")
    assert sites(result) == {
        "inputs_0": "inputs_0", "a": "a", "sigmoid": "sigmoid", "mul": "mul.Tensor", "b": "b"
    }  # fmt: skip


def test_float_values_are_rounded_once_and_only_where_integers_read_them() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = F.softplus(s.a(x))  # float between two sites
        y = y + s.b(y) + s.c(y)
        return torch.tanh(y)  # read by nothing: no site behind it

    result = prepared(run, "a b c")
    assert sites(result) == {
        "inputs_0": "inputs_0", "a": "a", "softplus": "softplus", "b": "b", "add": "add.Tensor", "c": "c",
        "add__2": "add.Tensor",
    }  # fmt: skip


@pytest.mark.case("constant-branch", outcome="float")
def test_constants_are_not_quantised_as_activations() -> None:
    """Factors and shifts of channels go into the scales of a layer, others stay in float."""

    def run(s: Any, x: Tensor) -> Tensor:
        return s.a(x) * s.gain.exp().unsqueeze(1) + s.gain[:, None]

    result = prepared(run, "a", gain=nn.Parameter(torch.ones(4, 1)))
    expected = {"inputs_0": "inputs_0", "a": "a", "mul": "mul.Tensor", "add": "add.Tensor"}
    assert sites(result) == expected
    assert {layer.name: layer.reason for layer in result.layers} == {"a": None, "gain": None}
    result = prepared(run, "a", gain=nn.Parameter(torch.ones(4, 6)))
    assert sites(result) == {"inputs_0": "inputs_0", "a": "a"}
    assert [layer.reason for layer in result.layers] == [None, "mul uses its parameters in float"]


def test_products_with_numbers_and_clamps_behind_them_have_no_sites() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        return s.b((y + 3).div(6).clamp(0, 1) * 0.5 - y)

    result = prepared(run, "a b")
    assert sites(result) == {
        "inputs_0": "inputs_0", "a": "a", "add": "add.Tensor", "add__2": "add.Tensor", "b": "b"
    }  # fmt: skip
    assert clips(result) == {"inputs_0": None, "a": None, "add": (0, 6), "add__2": None, "b": None}


def test_what_selects_by_size_does_not_read_codes_that_fall() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = -s.a(x)
        return s.b(F.max_pool2d(y, 2)), s.b(F.relu(y)), y.mean((2, 3))

    result = prepared(run, "a b")
    assert {"max_pool2d", "relu", "neg"} <= sites(result).keys()  # as float values, or rounded once more


def test_names_of_sites_do_not_hide_layers_or_each_other() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = s.add(x) + s.a.b_c(x) + s.a_b.c(x)
        return s.last(s.add(y.half().float()))

    result = prepared(
        run,
        "add last",
        a=nn.ModuleDict({"b_c": nn.Conv2d(4, 4, 1)}),
        a_b=nn.ModuleDict({"c": nn.Conv2d(4, 4, 1)}),
    )
    quantizers = [quantizer for _, quantizer in result.quantizers()]
    assert len(set(map(id, quantizers))) == len(result.sites)
    names = [site.name for site in result.sites]
    assert names == [
        "inputs_0", "add", "a.b_c", "add__2", "a_b.c", "add__3", "_to_copy", "add__4", "last",
    ]  # fmt: skip
    assert {site.anchor: site.name for site in result.sites}["add"] == "add"


def test_float_activations_need_no_sites() -> None:
    result = prepared(lambda s, x: s.b(F.relu(s.a(x))), "a b", {"abits": 32})
    assert result.sites == ()
    assert all(parametrize.is_parametrized(result.module.get_submodule(n), "weight") for n in "ab")


def test_quantisers_of_weights_and_activations_take_the_configuration() -> None:
    options = {"granularity": "channel", "act_fit": "minmax"}
    result = prepared(lambda s, x: s.t(s.a(x)), "a", options, t=nn.ConvTranspose2d(4, 4, 2, 2))
    quantizers = {n: result.module.get_submodule(n).parametrizations.weight[0] for n in ("a", "t")}
    assert {n: (q.k, q.granularity) for n, q in quantizers.items()} == {
        "a": (2, "channel"),
        "t": (2, "tensor"),
    }
    assert {quantizer.fit for _, quantizer in result.quantizers()} == {"minmax"}


def test_the_captured_graph_is_left_as_it_was_and_quantisers_start_off(
    randomise: Callable[[Any], Any],
) -> None:
    model = randomise(Net(lambda s, x: s.b(F.relu(s.norm(s.a(x)))), "a b", norm=nn.BatchNorm2d(4)))
    captured = capture(model, [X])
    before = str(captured.module.graph)
    result = prepare(captured, QuantConfig(wbits=8))
    assert str(captured.module.graph) == before
    assert not parametrize.is_parametrized(captured.module.get_submodule("a"))
    set_activations(result, "off")
    for name in "ab":  # with the float weights back, the prepared graph computes what the model computes
        parametrize.remove_parametrizations(
            result.module.get_submodule(name), "weight", leave_parametrized=False
        )
    assert torch.equal(result.module(X), model(X))


# The plan


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.up = nn.ConvTranspose2d(4, 2, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.group = nn.GroupNorm(1, 2)
        self.embed = nn.Embedding(5, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.layer_norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.twice = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.mix = nn.Parameter(torch.ones(4, 4))
        self.mix2 = nn.Parameter(torch.ones(4, 3))
        self.spare = nn.Linear(2, 2)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        x = self.group(self.norm(self.up(self.stem(image))))
        y = self.layer_norm(self.lstm(self.embed(tokens))[0])
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = self.twice(F.relu(self.twice(y))) * self.scale
        return (y @ self.mix @ self.mix2).mean(1) + x.mean((1, 2, 3)).unsqueeze(1)


INPUTS = [torch.randn(2, 3, 6, 6), torch.zeros(2, 7, dtype=torch.long)]


@pytest.fixture(scope="module")
def everything() -> Captured:
    torch.manual_seed(0)
    return capture(Everything().eval(), INPUTS)


@pytest.mark.case(
    "layer-norm",
    "group-norm",
    "attention",
    "embedding",
    "lstm-gru",
    "transposed-conv2d",
    "bn-alone",
    outcome="float",
)
@pytest.mark.case("attention", outcome="works")
@pytest.mark.case("unused-layer", outcome="works")
def test_every_layer_with_parameters_is_in_the_plan_once_with_its_reason(everything: Captured) -> None:
    result = prepare(everything, QuantConfig(wbits=2))
    own = {
        name: (layer.op, layer.parameters, layer.outputs, layer.quantized, layer.reason)
        for name, layer in ((layer.name, layer) for layer in result.layers)
    }
    in_float = "uses its parameters in float"
    weights_only = "quantised weights, float arithmetic: transposed convolution has no integer kernel"
    assert own == {
        "stem.0": ("Conv2d", 108, 64, True, None),
        "up": ("ConvTranspose2d", 34, 128, True, weights_only),
        "norm": (
            "BatchNorm2d", 4, 128, False, "BatchNorm2d stands behind no quantised layer that could absorb it",
        ),
        "group": ("group_norm", 4, 128, False, f"group_norm {in_float}"),
        "embed": ("embedding", 30, 42, False, f"embedding {in_float}"),
        "lstm": ("lstm", 6 * 16 + 4 * 16 + 2 * 16, 28, False, f"lstm {in_float}"),
        "layer_norm": ("layer_norm", 8, 28, False, f"layer_norm {in_float}"),
        "attention.in_proj": ("Linear", 60, 84, True, None),
        "attention.out_proj": ("Linear", 20, 28, True, None),
        "twice": ("Linear", 20, 56, True, None),
        "scale": ("mul", 4, 28, False, f"mul {in_float}"),
        "mix_linear": ("Linear", 16, 28, True, None),
        "mix2_linear": ("Linear", 12, 21, True, None),
    }  # fmt: skip
    # What is in no row: the norm that was folded, and the layer that is not used.
    counted = sum(layer.parameters for layer in result.layers)
    assert counted + 2 * 4 + 6 == sum(p.numel() for p in Everything().parameters())
    folded = "its computed weight was folded into a plain weight"
    assert sorted(everything.notes) == [
        f"mix2_linear: {folded}",
        f"mix_linear: {folded}",
        "spare: the forward pass does not use it; it is left out",
    ]


class Tokens(nn.Module):
    """A start token, a table of positions read through an index, a query behind a layer, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, 1, 4))
        self.table = nn.Parameter(torch.randn(6, 4))
        self.query = nn.Parameter(torch.randn(1, 4))
        self.project = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.prior = nn.Parameter(torch.zeros(1))
        self.register_buffer("order", torch.tensor([2, 0, 1, 3]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.start.expand(x.shape[0], -1, -1), x], 1) + self.table[self.order].view(1, 4, 4)
        return self.head(x * self.project(self.query)) * self.start, torch.exp(self.prior)


def test_parameters_are_called_as_the_user_calls_them_and_counted_once() -> None:
    torch.manual_seed(0)
    result = prepare(capture(Tokens().eval(), [torch.randn(2, 3, 4)]), QuantConfig(wbits=2))
    plan = {layer.name: (layer.op, layer.parameters, layer.outputs, layer.reason) for layer in result.layers}
    assert plan == {
        "start": ("expand", 4, 20, "expand uses its parameters in float"),
        # what reads it, not the index and the view in between: they compute constants
        "table": ("add", 24, 16, "add uses its parameters in float"),
        "project": ("Linear", 20, 4, None),
        "query": ("mul", 4, 16, "mul uses its parameters in float"),
        "head": ("Linear", 20, 16, None),
        "prior": ("output", 1, 0, "an output does not depend on the input"),
    }


def test_excluded_layers_stay_in_float_with_their_norms(everything: Captured) -> None:
    result = prepare(everything, QuantConfig(wbits=2, exclude=("stem.*", "attention.*_proj")))
    plan = {layer.name: layer for layer in result.layers}
    excluded = [name for name, layer in plan.items() if layer.reason == "excluded by the configuration"]
    assert excluded == ["stem.0", "attention.in_proj", "attention.out_proj"]
    assert not any(plan[name].quantized for name in excluded)
    assert plan["stem.1"].reason == "BatchNorm2d stands behind no quantised layer that could absorb it"
    assert [site.name for site in result.sites] == ["add", "twice", "mul", "mix_linear"]
    assert [layer.name for layer in result.float_results] == ["twice__2", "mix2_linear"]
    weighted = {n for n, m in result.module.named_modules() if parametrize.is_parametrized(m, "weight")}
    assert weighted == {"up", "twice", "mix_linear", "mix2_linear"}


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (("stem.0", "stm*"), "`exclude` stm*: no such layer; layers are stem.0, up, attention.in_proj, "),
        (("norm",), "`exclude` norm: no such layer"),
        (("*",), "nothing to quantise"),
    ],
)
def test_unusable_exclusions_are_named(everything: Captured, exclude: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        prepare(everything, QuantConfig(wbits=2, exclude=exclude))
    assert str(refused.value).startswith(message)
