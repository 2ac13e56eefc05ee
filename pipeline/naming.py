"""Names that are not in use yet."""

from __future__ import annotations

import itertools
from collections.abc import Container


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
