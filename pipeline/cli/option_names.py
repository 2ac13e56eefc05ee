"""Translate the library's messages, which name fields of the Python API, into options of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer.core import TyperGroup

#: a field in backquotes, `exclude`, or a field with its value, `granularity="channel"`
_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def option_names(group: TyperGroup, arguments: list[str]) -> dict[str, str]:
    """Return the options of the command that ``arguments`` start, by the names they have in Python.

    Args:
        group: the program with its commands.
        arguments: the command line.

    Returns:
        For example ``{"batch_size": "--batch-size", "exclude": "--exclude"}``; empty without a command.
    """
    names = {}
    for name in arguments:
        if command := group.commands.get(name):
            for parameter in command.params:
                if parameter.param_type_name == "option" and parameter.name:
                    option = max(parameter.opts, key=len)
                    names[parameter.name] = names[option.lstrip("-").replace("-", "_")] = option
            break
    return names


def with_options(message: str, names: Mapping[str, str]) -> str:
    """Return ``message`` with every field in backquotes that is an option written as one.

    Args:
        message: a message of the library, such as "give `overwrite` or another output".
        names: see `option_names`; other names stay in their backquotes.
    """

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in names:
            return match[0]
        value = "" if value in {None, "True"} else " " + value.strip("\"'")
        return names[name] + value

    return _FIELD.sub(option, message)
