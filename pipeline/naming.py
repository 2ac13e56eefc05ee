"""Names: those that are not in use yet, and those that a pattern means."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Container, Sequence

from ul2q.pipeline.errors import UsageError, listed


def unused_name(name: str, taken: Container[str], separator: str = "_") -> str:
    """Return ``name``, or ``name`` with the first number from 2 on that makes it unique.

    Args:
        name: the wanted name.
        taken: names in use.
        separator: what stands between name and number.

    Returns:
        A name that is not in ``taken``, which is left unchanged.
    """
    numbered = (f"{name}{separator}{n}" for n in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


def matching(layers: Sequence[str], pattern: str, option: str) -> list[str]:
    """Return the ``layers`` that ``pattern`` (fnmatch) names, as given for ``option``.

    Raises:
        UsageError: there are none.
    """
    matches = [layer for layer in layers if fnmatch.fnmatchcase(layer, pattern)]
    if not matches:
        raise UsageError(f"`{option}` {pattern}: no such layer; layers are {listed(layers)}")
    return matches
