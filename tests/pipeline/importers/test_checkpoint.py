"""Checkpoints of every form that people have, and files that are none."""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ul2q import models
from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.architectures import build_network
from ul2q.pipeline.importers.checkpoint import CheckpointRecord, load_checkpoint, save_checkpoint
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


@pytest.mark.case("nested-state", outcome="works")
@pytest.mark.parametrize("key", ["params", "weights", "generator"])
def test_weights_under_any_single_key(path: Path, key: str) -> None:
    torch.save({key: mlp().state_dict(), "iter": 7, "optimizer": {"state": {}, "param_groups": []}}, path)
    assert same(load(path).model, mlp())


def test_several_networks_are_named_and_none_is_chosen(path: Path) -> None:
    torch.save({"params": mlp().state_dict(), "params_ema": mlp(1).state_dict(), "iter": 7}, path)
    with pytest.raises(UsageError, match=r"holds weights at params, params_ema: save those of one network"):
        load(path)


@pytest.mark.parametrize("prefix", ["model.", "model.net.", "module.student."])
def test_what_stands_beside_the_network_is_all_that_is_unexpected(path: Path, prefix: str) -> None:
    weights = {prefix + name: value for name, value in mlp().state_dict().items()}
    torch.save({"state_dict": {**weights, "criterion.weight": torch.ones(3)}}, path)
    with pytest.raises(UsageError) as refused:
        load(path)
    assert str(refused.value) == f"{path} does not fit MLP: 1 unexpected: criterion.weight"


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
        UsageError, match=r"1021 unexpected: blocks\.0\.weight, .*\.19\.weight and 1,001 more$"
    ):
        load(path)


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
def test_pickled_module_whose_class_is_missing(path: Path, tmp_path: Path) -> None:
    code = (
        "import torch, sys, types; m = types.ModuleType('gone'); sys.modules['gone'] = m\n"
        "exec('import torch\\nclass Net(torch.nn.Linear): pass', m.__dict__)\n"
        f"torch.save(m.Net(2, 2), {str(path)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    with pytest.raises(UsageError, match=r"pickled objects \(gone\.Net\)"):
        load_checkpoint(path)
    with pytest.raises(UsageError, match=r"a class that cannot be imported .*gone.*PYTHONPATH"):
        load_checkpoint(path, trust_pickle=True)


def test_pickled_module_whose_class_is_in_the_current_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickled_nets_of_this_test.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    pass\n"
    )
    code = f"import torch, pickled_nets_of_this_test as m; torch.save(m.Net(2, 2), {str(path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match="a class that cannot be imported"):
        load_checkpoint(path, trust_pickle=True)
    monkeypatch.chdir(tmp_path)
    assert type(load_checkpoint(path, trust_pickle=True).model).__name__ == "Net"


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
