from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ul2q.pipeline.errors import JobError
from ul2q.pipeline.storage.torch_save import write_as_it_is, write_tensors


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def run(content: Any) -> bytes:
        write_tensors(tmp_path / "file.pt", content)
        return (tmp_path / "file.pt").read_bytes()

    return run


def test_bytes_do_not_depend_on_shared_strings_or_views(written: Any, tmp_path: Path) -> None:
    base = torch.arange(6.0)
    text = "".join(["ab", "c"])
    first = written({"a": "abc", "b": "abc", "t": base[2:4]})
    assert written({"a": text, "b": "".join(["a", "bc"]), "t": torch.tensor([2.0, 3.0])}) == first
    assert len(written({"t": torch.zeros(10_000)[:1]})) < 2000
    (tmp_path / "other.pt").write_bytes(first)
    assert torch.load(tmp_path / "other.pt", weights_only=True)["t"].tolist() == [2.0, 3.0]


def test_a_tensor_and_its_view_are_two_as_if_they_were_copies(written: Any) -> None:
    base = torch.arange(6.0)
    views = {"a": base, "b": base.view(2, 3), "c": base.view(2, 3).T, "d": base}
    copies = {"a": base.clone(), "b": base.view(2, 3).clone(), "c": base.view(2, 3).T.contiguous()}
    assert written(views) == written(copies | {"d": copies["a"]})
    parameter = torch.nn.Parameter(base)
    assert written({"a": parameter}) == written({"a": base.clone()})


def test_objects_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="plain types and tensors only, not set"):
        write_tensors(tmp_path / "file.pt", {"a": {1, 2}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("elements", [5, 5_000_000])
@pytest.mark.parametrize("write", [write_tensors, write_as_it_is])
def test_a_full_disk_is_told_as_such(
    elements: int, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has /dev/full")
    whole = Path.open
    monkeypatch.setattr(Path, "open", lambda _, mode: whole(Path("/dev/full"), mode))
    with pytest.raises(JobError, match=r"file.pt could not be written.*No space left on device"):
        write(tmp_path / "file.pt", {"t": torch.zeros(elements)})
