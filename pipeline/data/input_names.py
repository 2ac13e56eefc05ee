"""Names of the arrays that are the inputs of a network."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def match_names(keys: Collection[str], input_names: Sequence[str], suffix: str = "") -> list[str] | None:
    """Return the keys of the inputs: named as the inputs, ``x1``, ``x2``, …, or ``x`` if there is only one.

    Args:
        keys: names of arrays.
        input_names: names of the network's inputs.
        suffix: suffix of the names of the arrays.

    Returns:
        A key for each input, or None if one is missing under every naming.
    """
    numbered = [f"x{i + 1}" for i in range(len(input_names))]
    for naming in (["x"], input_names, numbered):
        matched = [f"{name}{suffix}" for name in naming]
        if len(matched) == len(input_names) and all(key in keys for key in matched):
            return matched
    return None
