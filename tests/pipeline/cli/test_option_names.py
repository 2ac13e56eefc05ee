"""Messages of the library name fields; the command line names the options of the running command."""

from __future__ import annotations

import io
from typing import cast

import pytest
import typer
from typer.core import TyperGroup

from ul2q.pipeline.cli import options
from ul2q.pipeline.cli.app import app, execute
from ul2q.pipeline.cli.option_names import option_names, with_options

GROUP = cast(TyperGroup, typer.main.get_command(app))


def test_every_option_of_a_command_is_known_by_its_names_in_python() -> None:
    names = option_names(GROUP, ["compress", "model.pt", "--wbits", "2"])
    assert names["exclude"] == "--exclude"
    assert names["batch_size"] == "--batch-size"
    assert names["output"] == "--output"
    assert names["as_json"] == names["json"] == "--json"
    assert "model" not in names  # an argument, not an option
    assert "exclude" not in option_names(GROUP, ["--debug", "train", "lenet5"])
    assert option_names(GROUP, ["--version"]) == option_names(GROUP, []) == {}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`exclude` 'nope*' matches no layer", "--exclude 'nope*' matches no layer"),
        ("give `trust_pickle=True` or `batch_size`", "give --trust-pickle or --batch-size"),
        ("`granularity='channel'` may help", "--granularity channel may help"),
        ("give `abits=8`", "give --abits 8"),
        ("call `model.state_dict()`, not `model` or `Exclude`", None),
        ("a single ` and `exclude and `exclude pattern`", None),
    ],
)
def test_fields_are_written_as_options(message: str, shown: str | None) -> None:
    assert with_options(message, option_names(GROUP, ["compress"])) == (shown or message)


def test_a_name_that_is_no_option_of_the_command_stays() -> None:
    assert with_options("give `exclude`", option_names(GROUP, ["train"])) == "give `exclude`"


def test_errors_progress_and_warnings_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compress", "none.pt", "--wbits", "9"]) == 2
    assert capsys.readouterr().err == "error: --wbits is 9: weights take 1 to 8 bits\n"
    assert options.message_text("more `epochs`") == "more --epochs"
    progress = options.start(quiet=False, debug=True)
    progress.stream = io.StringIO()
    progress.line("`resume` would have gone on")
    assert progress.stream.getvalue() == "--resume would have gone on\n"
