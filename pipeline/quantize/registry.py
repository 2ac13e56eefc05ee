"""Registry of the weight quantisers.

Help texts, errors and `QuantConfig` read it, so that this module imports no numerical library. The
arithmetic of a quantiser is loaded by its entry's ``rule``. A new quantiser is a file in
`ul2q.pipeline.quantize.rules` and its entry in `QUANTIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from ul2q.pipeline.quantize.rules.rule import WeightRule


@dataclass(frozen=True)
class Quantizer:
    """A weight quantiser.

    Attributes:
        name: as the option and the configuration name it.
        title: as figures name it.
        levels: its levels, for help texts and documentation.
        widths: its widths in bits, ascending.
        rule: loads its arithmetic.
        unused_codes: number of lowest codes that it never assigns: it has 2^k − unused_codes levels.
        note: what the report says about a model quantised with it, if anything.
    """

    name: str
    title: str
    levels: str
    widths: Sequence[int]
    rule: Callable[[], WeightRule]
    unused_codes: int = 0
    note: str | None = None

    @property
    def width_range(self) -> str:
        """The widths as text: "2", or "1 to 8"."""
        first, last = self.widths[0], self.widths[-1]
        return f"{first}" if first == last else f"{first} to {last}"


# The arithmetic is imported on use: help texts must not wait for numerical libraries.


def _ul2q() -> WeightRule:
    from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q

    return MuL2Q()


def _bwn() -> WeightRule:
    from ul2q.pipeline.quantize.rules.bwn import BinaryWeights

    return BinaryWeights()


def _twn() -> WeightRule:
    from ul2q.pipeline.quantize.rules.twn import TernaryWeights

    return TernaryWeights()


def _fixed() -> WeightRule:
    from ul2q.pipeline.quantize.rules.fixed_point import FixedPoint

    return FixedPoint()


def _dorefa() -> WeightRule:
    from ul2q.pipeline.quantize.rules.dorefa import DoReFa

    return DoReFa()


_DEFINITIONS: Final = (
    Quantizer(
        "ul2q",
        "μL2Q",
        "μ + λ*σ(q + ½): the step λ* of the least squared error on normal weights",
        range(1, 9),
        _ul2q,
    ),
    Quantizer("bwn", "BWN", "±mean|w|", (1,), _bwn),
    Quantizer(
        "twn",
        "TWN",
        "−s, 0, s with 0 where |w| <= 0.7·mean|w|",
        (2,),
        _twn,
        unused_codes=1,
        note="twn stores 2 bits a weight and uses three of their four levels",
    ),
    Quantizer(
        "fixed",
        "fixed point",
        "two's complement with the integer part of max|w|, fraction truncated",
        range(2, 9),
        _fixed,
    ),
    Quantizer(
        "dorefa",
        "DoReFa",
        "2^k levels from −1 to 1, nearest to tanh(w)/max|tanh(w)|",
        range(1, 9),
        _dorefa,
    ),
)

QUANTIZERS: Final[Mapping[str, Quantizer]] = {definition.name: definition for definition in _DEFINITIONS}
"""Every weight quantiser by its name; the first is the default, the others are for comparison."""

DEFAULT_QUANTIZER: Final = next(iter(QUANTIZERS))


def check_quantizer(quantizer: str, k: int) -> None:
    """Check that a quantiser exists and has the width ``k``.

    Raises:
        UsageError: it does not.
    """
    if quantizer not in QUANTIZERS:
        raise UsageError(f"`quantizer` is {quantizer!r}: use one of {', '.join(QUANTIZERS)}")
    definition = QUANTIZERS[quantizer]
    if k not in definition.widths:
        raise UsageError(
            f"{quantizer} has no {k}-bit weights: set `wbits` to {definition.width_range}, "
            "or use another `quantizer`"
        )


def quantizer_help() -> str:
    """Return the quantisers in one sentence, for the help text of an option."""
    default, *others = QUANTIZERS.values()
    compared = [
        other.name
        if other.widths == default.widths
        else f"{other.name} ({other.width_range} bit{'s' * (other.width_range != '1')})"
        for other in others
    ]
    return f"{default.name}; to compare: {', '.join(compared[:-1])} or {compared[-1]}."
