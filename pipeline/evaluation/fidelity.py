"""How far the outputs of a quantised network are from those of the float network, with or without targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.tasks.inference import evaluating, evaluation_batch, output_tensors

# Samples that are compared, and about their input elements.
_MOST: Final = 512
_LEAST: Final = 8
_ELEMENTS: Final = 2**22

#: maps the outputs of a network to the class of each sample, or position, by output; None where it has none
Decisions = Callable[[Any], Sequence[Tensor | None]]


@dataclass(frozen=True)
class OutputFidelity:
    """Agreement of one output.

    Attributes:
        name: name of the output.
        relative_error: root of the mean squared error over the standard deviation of the float output, which
            is taken over samples, element by element.
        sqnr_db: mean square of the float output over the mean squared error.
        cosine: mean over samples of the cosine of both outputs; over all samples where one is a number.
        same_class: fraction of equal decisions; None where there are no classes.
    """

    name: str
    relative_error: float | None
    sqnr_db: float | None
    cosine: float | None
    same_class: float | None


class _Sums:
    """Sums over the samples of one output."""

    def __init__(self) -> None:
        self.samples = self.elements = 0
        self.noise = self.power = 0.0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.dot = self.ours = self.cosines = 0.0
        self.decided = self.same = 0

    def add(self, q: Tensor, f: Tensor) -> None:
        """Add a batch of the quantised output and the float one, both [N, ...]."""
        q, f = q.double().flatten(1), f.double().flatten(1)
        self.samples, self.elements = self.samples + len(f), self.elements + f.numel()
        self.noise += float((q - f).square().sum())
        self.power += float(f.square().sum())
        self.total, self.squares = self.total + f.sum(0), self.squares + f.square().sum(0)
        self.dot += float((q * f).sum())
        self.ours += float(q.square().sum())
        self.cosines += float(torch.cosine_similarity(q, f, dim=1).sum())

    def result(self, name: str) -> OutputFidelity:
        """Return the figures."""
        variance = self.squares / self.samples - (self.total / self.samples) ** 2
        mean = float(torch.as_tensor(variance).clamp(min=0).mean())
        error = self.noise / self.elements
        single = self.elements == self.samples
        norms = math.sqrt(self.power * self.ours)
        return OutputFidelity(
            name,
            math.sqrt(error / mean) if mean > 0 else None,
            10 * math.log10(self.power / self.noise) if self.noise > 0 and self.power > 0 else None,
            (self.dot / norms if norms else None) if single else self.cosines / self.samples,
            self.same / self.decided if self.decided else None,
        )


def held_out(data: DataSplits) -> tuple[str, Dataset]:
    """Return the samples that fine-tuning learns least from, with the name of their part."""
    parts = {"test": data.test, "validation": data.validation, "train": data.train}
    return next((name, part) for name, part in parts.items() if part is not None)


def fidelity(
    model: nn.Module, reference: nn.Module, data: DataSplits, names: Sequence[str], decisions: Decisions
) -> dict[str, Any]:
    """Compare a network with the float one on held-out samples.

    Args:
        model: the quantised network.
        reference: the float network.
        data: the samples; those of the test are used, else of the validation, else of the training.
        names: names of the outputs.
        decisions: the classes that outputs stand for.

    Returns:
        The field ``fidelity`` of report.json.
    """
    part, dataset = held_out(data)
    wanted = min(_MOST, max(_LEAST, _ELEMENTS // max(1, math.prod(dataset.shape))), len(dataset))
    sums: list[_Sums] = []
    count = 0
    with evaluating(model), evaluating(reference):
        for inputs, _ in batches(dataset, min(wanted, evaluation_batch(dataset.shape))):
            outputs, expected = model(*inputs), reference(*inputs)
            pairs = list(zip(output_tensors(outputs), output_tensors(expected), strict=True))
            sums = sums or [_Sums() for _ in pairs]
            for one, (q, f) in zip(sums, pairs, strict=True):
                one.add(q, f)
            for one, a, b in zip(sums, decisions(outputs), decisions(expected), strict=False):
                if a is not None and b is not None:
                    one.decided, one.same = one.decided + a.numel(), one.same + int((a == b).sum())
            count += len(inputs[0])
            if count >= wanted:
                break
    named = [*names, *(str(i) for i in range(len(names), len(sums)))]
    figures = [asdict(one.result(name)) for one, name in zip(sums, named, strict=False)]
    return {"samples": count, "part": part, "outputs": figures}
