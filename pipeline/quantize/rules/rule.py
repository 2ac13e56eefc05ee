"""The interface of a weight quantiser: step and offset, codes, and the deployable grid.

All quantisers have evenly spaced levels α(q + 1/2) + β, so that `deployable_grid` makes them integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.grid import Grid, deployable_grid
from ul2q.pipeline.quantize.ul2q import Array

Steps = tuple[np.ndarray, np.ndarray]


class WeightRule(ABC):
    """Arithmetic of a weight quantiser.

    Attributes:
        codes_follow_grid: whether the codes are ⌊(w − β̂)/α⌋ in float32 on the deployable grid, which torch
            computes on any device. Else they are computed in NumPy.
    """

    codes_follow_grid: ClassVar[bool] = False

    @abstractmethod
    def scale_offset(self, w: Array, k: int, axis: int | None = None) -> Steps:
        """Return step and offset as published, before any level is moved.

        Args:
            w: weight of any shape and floating type.
            k: width in bits.
            axis: None for one pair per tensor, otherwise the channel axis.

        Returns:
            α and β, float32 of shape [] or [C]; α = 0 where the weights do not vary.

        Raises:
            UsageError: the weight is empty or not finite.
        """

    @abstractmethod
    def codes(
        self, w: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int, granularity: str, channel_axis: int
    ) -> np.ndarray:
        """Return the codes, −2^(k−1)..2^(k−1) − 1, int8 of the shape of ``w``.

        Args:
            w: weight of any shape and floating type.
            alpha: step, float32 [] or [C]; where it is 0 the code is 0.
            beta: offset, as ``alpha``: β, or β̂ of a grid.
            k: width in bits.
            granularity: "tensor" or "channel".
            channel_axis: axis of the output channels.

        Returns:
            The codes.

        Raises:
            UsageError: the weight is empty or not finite.
        """

    def grid(self, w: Array, k: int, granularity: str, channel_axis: int) -> Grid:
        """Return the deployable grid of a weight."""
        axis = channel_axis if granularity == "channel" else None
        alpha, beta = self.scale_offset(w, k, axis)
        return deployable_grid(ul2q.to_numpy(alpha), ul2q.to_numpy(beta), k)

    def quantize(self, w: np.ndarray, k: int, granularity: str, channel_axis: int) -> tuple[np.ndarray, Grid]:
        """Return the codes on the deployable grid, int8 of the shape of ``w``, and the grid."""
        grid = self.grid(w, k, granularity, channel_axis)
        return self.codes(w, grid.alpha, grid.beta, k, granularity, channel_axis), grid


class RowRule(WeightRule):
    """A quantiser defined on rows: float64 [R, n], one row per tensor or per channel."""

    @abstractmethod
    def fit(self, rows: np.ndarray, k: int) -> Steps:
        """Return α and β, float64 [R]; α is 0 for rows that do not vary."""

    @abstractmethod
    def row_codes(self, rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:
        """Return the codes [R, n] for α > 0 and β [R], which the deployable grid may have moved."""

    def scale_offset(self, w: Array, k: int, axis: int | None = None) -> Steps:
        """Return `fit` in float32, with α = β = 0 where the step is below `ul2q.SMALLEST_STEP`."""
        alpha, beta = self.fit(_rows(w, "tensor" if axis is None else "channel", axis or 0), k)
        tiny = alpha < ul2q.SMALLEST_STEP
        shape = () if axis is None else (-1,)
        alpha, beta = (
            np.where(tiny, 0, values).astype(np.float32).reshape(shape) for values in (alpha, beta)
        )
        return alpha, beta

    def codes(
        self, w: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int, granularity: str, channel_axis: int
    ) -> np.ndarray:
        """Return `row_codes` in the shape of ``w``."""
        rows = _rows(w, granularity, channel_axis)
        step, offset = (np.broadcast_to(v, (len(rows),)).astype(np.float64) for v in (alpha, beta))
        varying = step > 0
        q = self.row_codes(rows, np.where(varying, step, 1), offset, k)
        return _from_rows(np.where(varying[:, None], q, 0).astype(np.int8), w, granularity, channel_axis)


def clipped(codes: np.ndarray, k: int) -> np.ndarray:
    """Return ``codes`` within −2^(k−1)..2^(k−1) − 1."""
    return np.clip(codes, -(2 ** (k - 1)), 2 ** (k - 1) - 1)


def nearest(rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:
    """Return the codes [R, n] of the levels nearest to ``rows`` [R, n], for α and β [R]."""
    return clipped(np.floor((rows - beta[:, None]) / alpha[:, None]), k)


def _rows(w: np.ndarray, granularity: str, channel_axis: int) -> np.ndarray:
    """Return the float32 values of ``w`` as float64 rows, one per tensor or per channel.

    Raises:
        UsageError: ``w`` is empty, or not finite as float32.
    """
    if 0 in w.shape:
        raise UsageError(f"a weight of shape {tuple(w.shape)} has no elements to quantise")
    with np.errstate(over="ignore"):  # values that are not finite are reported below
        values = np.asarray(w).astype(np.float32)
    largest = np.max(abs(values))
    ul2q.require_finite(values, largest, largest, np)
    if granularity == "channel":
        values = np.moveaxis(values, channel_axis, 0)
        return values.reshape(len(values), -1).astype(np.float64)
    return values.reshape(1, -1).astype(np.float64)


def _from_rows(rows: np.ndarray, w: np.ndarray, granularity: str, channel_axis: int) -> np.ndarray:
    """Return ``rows`` in the shape of ``w``: the inverse of `_rows`."""
    if granularity == "tensor":
        return rows.reshape(w.shape)
    shape = np.moveaxis(w, channel_axis, 0).shape
    return np.moveaxis(rows.reshape(shape), 0, channel_axis)
