"""All tasks by name, and the choice of the task from the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ul2q import models
from ul2q.pipeline.data import DataSplits
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.classification import Classification
from ul2q.pipeline.tasks.dense import Dense
from ul2q.pipeline.tasks.inference import Model
from ul2q.pipeline.tasks.task import Task

TASKS: Final[Mapping[str, type[Task]]] = {task.name: task for task in (Classification, Dense)}
"""Every task by its name; the first that fits the data is chosen, the first of all without targets."""


def task_for(data: DataSplits, model: Model | None = None) -> Task:
    """Return the task that the targets of ``data`` define.

    Args:
        data: samples with labels, masks, or without targets.
        model: a trained network, whose outputs settle what the targets leave open; None before training.

    Returns:
        The task.
    """
    default = next(iter(TASKS.values()))
    task = next((task for task in TASKS.values() if task.fits(data)), default)
    return task.from_data(data, model)


def check_network(arch: str, task: Task, spec: str) -> None:
    """Check that an architecture of the registry is made for ``task``.

    Raises:
        UsageError: it is made for another task; the message names architectures that fit.
    """
    made_for = models.get(arch).task
    if made_for == task.name:
        return
    fitting = ", ".join(name for name in models.names() if models.get(name).task == task.name)
    raise UsageError(f"{spec} has {task.targets}, {arch} is for {made_for}: use one of {fitting}")
