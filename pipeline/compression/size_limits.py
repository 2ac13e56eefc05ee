"""Find the widths of all layers for a limit of the file's size or of the drop in accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ul2q.exporters.onnx.export import export_lowered
from ul2q.pipeline.compression.calibrate import calibrate, compared_samples
from ul2q.pipeline.compression.finetune import as_it_takes_effect
from ul2q.pipeline.compression.run_state import Run
from ul2q.pipeline.compression.width_allocation import Allocation, Candidates, candidates
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import Captured
from ul2q.pipeline.graph.lower import lower
from ul2q.pipeline.graph.prepare import Prepared, prepare

#: points of the curve of predicted loss over bytes
POINTS: Final = 16
# Files that are made to meet a limit of the size, at most, and the part of it that may be left.
_FILES, _CLOSE = 4, 0.01


def allocate_widths(
    run: Run,
    prepared: Prepared,
    captured: Captured,
    given: QuantConfig,
    float_bytes: int,
    metadata: Mapping[str, str],
) -> tuple[Run, Allocation]:
    """Choose a width for every layer.

    Args:
        run: the run; its widths are the largest.
        prepared: its graph with quantisers of these widths.
        captured: the float network.
        given: the configuration as it was given, before defaults took effect that depend on the widths.
        float_bytes: bytes of the float file.
        metadata: metadata of the file.

    Returns:
        The run with the widths, and what was chosen.

    Raises:
        UsageError: no widths meet the limit, or the score is not defined.
    """
    layers = [plan.name for plan in prepared.layers if plan.quantized]
    found = candidates(captured.module, layers, run.config, compared_samples(run.calibration), run.task)
    search = _Search(run, captured, given, found, metadata)
    limit = given.size_limit(float_bytes)
    widths, drop = search.within_drop() if limit is None else (search.within_size(limit), None)
    chosen = search.run_at(widths)
    curve = tuple((found.bytes(w), found.loss(w)) for w in search.curve)
    return chosen, Allocation(limit, found.bytes(widths), found.loss(widths), curve, drop)


@dataclass(frozen=True)
class _Search:
    run: Run
    captured: Captured
    given: QuantConfig
    found: Candidates
    metadata: Mapping[str, str]

    @property
    def curve(self) -> list[tuple[int, ...]]:
        """The best widths for sizes from the smallest to the largest."""
        least, most = (self.found.bytes(w) for w in (self.found.smallest, self.found.largest))
        sizes = np.geomspace(least, most, POINTS).round().astype(int)
        sizes[0], sizes[-1] = least, most
        return list(dict.fromkeys(w for size in sizes if (w := self.found.best(int(size))) is not None))

    def run_at(self, widths: tuple[int, ...]) -> Run:
        """Return the run with ``widths``."""
        config = dataclasses.replace(self.given, layer_wbits=self.found.by_layer(widths))
        return dataclasses.replace(self.run, config=as_it_takes_effect(config))

    def within_size(self, limit: int) -> tuple[int, ...]:
        """Return the widths of the least predicted loss whose file takes at most ``limit`` bytes.

        Raises:
            UsageError: there are none.
        """
        widths = self.found.largest
        size = self._file_bytes(widths)
        best = widths if size <= limit else None
        for _ in range(_FILES):
            if best is not None and (best == self.found.largest or limit - size <= _CLOSE * limit):
                break
            # What is in the file beside the weights hardly depends on their widths.
            allowed = limit - (size - self.found.bytes(widths))
            proposed = self.found.best(allowed)
            if proposed is None and size > limit:
                proposed = self.found.smallest
            if proposed is None or proposed == widths:
                break
            widths = proposed
            size = self._file_bytes(widths)
            if size <= limit and (best is None or self.found.loss(widths) < self.found.loss(best)):
                best = widths
        if best is None:
            least = self._file_bytes(self.found.smallest)
            raise UsageError(
                f"`budget` is {limit:,} bytes: the file takes {least:,} bytes with 1 bit a weight; give more"
            )
        return best

    def _file_bytes(self, widths: tuple[int, ...]) -> int:
        """Return the size of the file at ``widths``; fine-tuning does not change it."""
        run = self.run_at(widths)
        lowered = lower(self._calibrated(run, dataclasses.replace(run.config, curvature="off")))
        return len(export_lowered(lowered, run.example(), run.config, self.metadata).to_bytes())

    def _calibrated(self, run: Run, config: QuantConfig) -> Prepared:
        prepared = prepare(self.captured, config)
        calibrate(
            prepared, self.captured.module, run.calibration, synthetic=run.is_synthetic,
            balanced=run.task.has_units,
        )  # fmt: skip
        return prepared

    def within_drop(self) -> tuple[tuple[int, ...], float]:
        """Return the smallest widths of the curve whose score drops by at most `QuantConfig.max_drop` points.

        The score is that of validation samples without fine-tuning; it is taken to rise with the size. If
        even the largest widths drop by more they are chosen, for fine-tuning may help.

        Raises:
            UsageError: there are no labelled validation samples.
        """
        if self.run.data.validation is None or not self.run.data.labelled:
            raise UsageError("`max_drop` is a drop of the score on labelled validation samples: give some")
        reference = self.captured.module
        best_score = self.run.score(reference, reference)
        curve = self.curve
        drops: dict[int, float] = {}

        def drop(i: int) -> float:
            if i not in drops:
                run = self.run_at(curve[i])
                prepared = self._calibrated(run, run.config)
                drops[i] = 100 * (best_score - self.run.score(prepared.module, reference))
            return drops[i]

        low, high = 0, len(curve) - 1
        while low < high:
            middle = (low + high) // 2
            assert self.given.max_drop is not None  # noqa: S101  (else there is a limit of the size)
            if drop(middle) <= self.given.max_drop:
                high = middle
            else:
                low = middle + 1
        return curve[low], drop(low)
