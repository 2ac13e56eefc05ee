"""Quantise a weight by any registered quantiser.

Gradients pass straight through for all of them. The arithmetic of the quantisers other than μL2Q is NumPy's:
their codes follow from the float32 weights by float64 operations, and training uses these codes.
"""

from __future__ import annotations

import numpy as np

from ul2q.pipeline.quantize.grid import Grid
from ul2q.pipeline.quantize.option_values import check_granularity
from ul2q.pipeline.quantize.registry import DEFAULT_QUANTIZER, QUANTIZERS, check_quantizer
from ul2q.pipeline.quantize.rules.rule import Steps, WeightRule


def rule_for(quantizer: str, k: int, granularity: str = "tensor") -> WeightRule:
    """Return the arithmetic of a quantiser.

    Args:
        quantizer: a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.
        k: width in bits.
        granularity: "tensor" or "channel".

    Returns:
        The rule.

    Raises:
        UsageError: an unknown quantiser or granularity, or a width that the quantiser does not have.
    """
    check_quantizer(quantizer, k)
    check_granularity(granularity)
    return QUANTIZERS[quantizer].rule()


def scale_offset(w: np.ndarray, k: int, quantizer: str, axis: int | None = None) -> Steps:
    """Return step and offset of a weight as published, before any level is moved.

    Args:
        w: weight of any shape and floating type.
        k: width in bits, one that the quantiser has.
        quantizer: a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.
        axis: None for one pair per tensor, otherwise the channel axis.

    Returns:
        α and β, float32 of shape [] or [C]; α = 0 where all weights are 0.

    Raises:
        UsageError: an unknown quantiser or width, or a weight that is empty or not finite.
    """
    return rule_for(quantizer, k).scale_offset(w, k, axis)


def codes(
    w: np.ndarray,
    alpha: np.ndarray,
    beta: np.ndarray,
    k: int,
    quantizer: str,
    granularity: str = "tensor",
    channel_axis: int = 0,
) -> np.ndarray:
    """Return the integer codes of a weight, −2^(k−1)..2^(k−1) − 1.

    Args:
        w: weight of any shape and floating type.
        alpha: step, float32 [] or [C]; where it is 0 the code is 0.
        beta: offset, as ``alpha``: β, or β̂ of a grid.
        k: width in bits.
        quantizer: a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels.

    Returns:
        The codes, int8 of the shape of ``w``.

    Raises:
        UsageError: an unknown quantiser or width, or a weight that is empty or not finite.
    """
    return rule_for(quantizer, k, granularity).codes(w, alpha, beta, k, granularity, channel_axis)


def quantize(
    w: np.ndarray,
    k: int,
    granularity: str = "tensor",
    channel_axis: int = 0,
    quantizer: str = DEFAULT_QUANTIZER,
) -> tuple[np.ndarray, Grid]:
    """Quantise a weight: the interface of `grid.quantize_weight` for every quantiser.

    Args:
        w: weight of any shape and floating type (computed with as float32).
        k: width in bits, one that the quantiser has.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels (1 for ConvTranspose weights).
        quantizer: a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.

    Returns:
        The codes q, int8 of the shape of ``w``, and the deployable grid.

    Raises:
        UsageError: an unknown quantiser, width or granularity, an empty weight or one that is not finite.
    """
    return rule_for(quantizer, k, granularity).quantize(w, k, granularity, channel_axis)
