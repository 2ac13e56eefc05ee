"""The registry and every architecture in it, found through the registry itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from ul2q import models
from ul2q.pipeline.errors import UsageError


def weights_and_biases(model: nn.Module) -> int:
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(p.numel() for layer in layers for p in layer.parameters())


def layer_outputs(model: nn.Module, shape: tuple[int, ...]) -> int:
    counted: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda _m, _i, out: counted.append(out[0].numel()))
    model.eval()(torch.zeros(1, *shape))
    return sum(counted)


SMALL = ("cifarnet", "lenet5", "mlp", "mobilenet_small", "resnet8", "vgg_like")
LARGE = ("alexnet", "mobilenet_v2", "resnet18", "resnet18_paper", "resnet34", "resnet50")
DENSE = ("linknet", "unet", "unetplusplus")


def test_every_architecture_is_tested() -> None:
    assert sorted(SMALL + LARGE + DENSE) == list(models.names())


@pytest.mark.parametrize("name", models.names())
def test_default_network_maps_its_default_input_to_its_output(name: str) -> None:
    architecture = models.get(name)
    assert models.input_shape(name) == architecture.input_shape
    with torch.device("meta"):  # shapes only
        model = models.build(name)
        assert model.training
        out = model.eval()(torch.zeros(2, *architecture.input_shape))
    positions = architecture.input_shape[1:] if name in DENSE else ()
    assert out.shape == (2, architecture.num_classes, *positions)
    assert architecture.task == ("dense" if name in DENSE else "classification")


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("name", SMALL)
def test_network_built_for_a_shape_takes_it(name: str, shape: tuple[int, int, int]) -> None:
    args = json.loads(json.dumps(models.arguments_for(name, shape, 7)))
    size_known = "input_size" in args
    assert models.input_shape(name, args) == (shape if size_known else (shape[0], 32, 32))
    assert models.build(name, **args).eval()(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", LARGE)
def test_large_network_built_for_a_shape_takes_it(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, **models.arguments_for(name, (1, 96, 80), 7))
        assert model.eval()(torch.zeros(3, 1, 96, 80)).shape == (3, 7)


@pytest.mark.parametrize("name", DENSE)
def test_dense_network_answers_a_probability_for_every_pixel(name: str) -> None:
    out = models.build(name, in_channels=2, num_classes=3).eval()(torch.randn(1, 2, 32, 64))
    assert out.shape == (1, 3, 32, 64)
    assert 0 < out.min() < out.max() < 1


@pytest.mark.parametrize("name", [*SMALL, "mobilenet_v2"])
def test_same_seed_gives_the_same_weights_and_another_seed_does_not(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.cat([p.detach().flatten() for p in models.build(name).parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ("name", "parameters", "outputs"),
    [
        ("lenet5", 1_663_370, 38_154),
        ("cifarnet", 85_098, 43_114),
        ("mobilenet_v2", 3_470_760, 6_679_112),
        ("resnet18_paper", 11_684_008, None),
    ],
)
def test_counts_are_those_of_the_paper(name: str, parameters: int, outputs: int | None) -> None:
    with torch.device("meta"):
        model = models.build(name)
        assert weights_and_biases(model) == parameters
        assert outputs is None or layer_outputs(model, models.input_shape(name)) == outputs


# What torchvision's documentation states for its weight files, and the entries in them.
TORCHVISION = {
    "resnet18": (11_689_512, 122, "layer4.1.bn2.num_batches_tracked"),
    "resnet34": (21_797_672, 218, "layer3.5.conv2.weight"),
    "resnet50": (25_557_032, 320, "layer2.0.downsample.1.running_mean"),
    "mobilenet_v2": (3_504_872, 314, "features.17.conv.3.running_var"),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_weight_files_of_torchvision_fit(name: str) -> None:
    parameters, entries, key = TORCHVISION[name]
    with torch.device("meta"):
        model = models.build(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == entries
    assert key in model.state_dict()


@pytest.mark.parametrize("name", DENSE)
def test_the_encoder_takes_the_weights_of_resnet50(name: str) -> None:
    with torch.device("meta"):
        encoder, resnet = models.build(name).encoder, models.build("resnet50")
    shapes = {key: value.shape for key, value in resnet.state_dict().items() if not key.startswith("fc.")}
    assert {key: value.shape for key, value in encoder.state_dict().items()} == shapes


def test_resnet8_names_are_torchvisions() -> None:
    keys = set(models.build("resnet8").state_dict())
    expected = {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer2.0.bn2.bias", "fc.bias"}
    assert expected | {"layer2.0.downsample.0.weight", "layer3.0.downsample.1.weight"} <= keys
    assert not any(key.startswith("layer1.0.downsample") for key in keys)


def test_mobilenet_small_is_depthwise() -> None:
    convs = [m for m in models.build("mobilenet_small").modules() if isinstance(m, nn.Conv2d)]
    assert sum(conv.groups == conv.in_channels > 1 for conv in convs) == 5


def test_mlp_takes_any_number_of_hidden_layers() -> None:
    for hidden in ([], [5], [5, 6, 7]):
        model = models.build("mlp", hidden=hidden, input_size=[4, 4])
        assert weights_and_biases(model) == sum(
            (a + 1) * b for a, b in zip([16, *hidden], [*hidden, 10], strict=True)
        )
        assert model(torch.zeros(2, 1, 4, 4)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lenet", "lenet5"), ("ResNet8", "resnet8"), ("zzz", "lenet5, linknet"), ("_blocks", "known")],
)
def test_unknown_name_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match="unknown architecture") as error:
        models.build(name)
    assert hint in str(error.value)


def test_unknown_argument_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"lenet5 does not take channels.*in_channels, num_classes, input_size"
    ):
        models.build("lenet5", channels=3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="2x8 is too small"):
        models.build("lenet5", input_size=[2, 8])
    with pytest.raises(UsageError, match=r"takes images \(C, H, W\)"):
        models.arguments_for("mlp", (64,), 10)


def test_listing_names_imports_neither_torch_nor_an_architecture() -> None:
    code = (
        "import sys, ul2q.models as m; m.names(); print(*('torch' in n or 'mlp' in n for n in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) == {"False"}
