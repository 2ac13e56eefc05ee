"""All tasks by name, and the choice of the task from the targets and the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.utils import _pytree as pytree

from ul2q import models
from ul2q.pipeline.config import AUTO_TASK
from ul2q.pipeline.data import DataSplits
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.classification import Classification
from ul2q.pipeline.tasks.dense import Dense
from ul2q.pipeline.tasks.embedding import Embedding
from ul2q.pipeline.tasks.inference import Model
from ul2q.pipeline.tasks.multilabel import Multilabel
from ul2q.pipeline.tasks.regression import Regression
from ul2q.pipeline.tasks.several import Several
from ul2q.pipeline.tasks.task import Task
from ul2q.pipeline.tasks.tokens import Tokens
from ul2q.pipeline.tasks.unknown import Unknown

TASKS: Final[Mapping[str, type[Task]]] = {
    task.name: task
    for task in (Classification, Dense, Multilabel, Tokens, Regression, Several, Embedding, Unknown)
}
"""Every task by its name; the first that fits targets and outputs is chosen."""


def task_for(data: DataSplits, model: Model | None = None) -> Task:
    """Return the task that the targets of ``data`` define, see `settle`."""
    task, _ = settle(data, model)
    return task


def settle(
    data: DataSplits,
    model: Model | None = None,
    *,
    outputs: Any = None,
    name: str = AUTO_TASK,
    known: str | None = None,
) -> tuple[Task, DataSplits]:
    """Return the task of a network, and its data with the targets in the form that the task takes.

    Args:
        data: samples with or without targets.
        model: a trained network, whose outputs settle what the targets leave open; None before training.
        outputs: what it returns for a batch [N, ...]; None before training.
        name: name of the task, or ``auto`` to choose the first that fits.
        known: the task that the architecture is for; decides where there are no targets.

    Returns:
        The task and the data.

    Raises:
        UsageError: the targets do not fit the task, or the outputs do not fit the targets.
    """
    if name != AUTO_TASK:
        kind = TASKS[name]
    elif not data.labelled:
        kind = TASKS[known or Unknown.name]
    else:
        kind = _fitting(data, outputs)
    data = kind.adopt(data, outputs)
    return kind.from_data(data, model), data


def _fitting(data: DataSplits, outputs: Any) -> type[Task]:
    """Return the first task that fits targets and outputs.

    Raises:
        UsageError: none does, or the targets leave two open.
    """
    form = data.target_format
    if form is not None and len(form.forms) == 1 and form.forms[0].one_hot:
        raise UsageError(
            f"{data.spec}: the targets {list(form.forms[0].shape)} are one-hot: take the arg max of one-hot "
            "rows, or give `task='classification'` or `task='multilabel'`"
        )
    for task in TASKS.values():
        if task.fits(data, outputs):
            return task
    if form is None:
        return Classification  # says what is wrong with the outputs
    targets = ", ".join(map(str, form.forms))
    raise UsageError(
        f"{data.spec} has {targets}, the network returns {shown_outputs(outputs)}: no task fits both; give "
        "targets in the shape of the outputs, or `task`"
    )


def shown_outputs(outputs: Any) -> str:
    """Return the shapes of the outputs of a batch, for example "[N, 4]"."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    shapes = [", ".join(["N", *map(str, leaf.shape[1:])]) for leaf in leaves]
    return ", ".join(f"[{shape}]" for shape in shapes[:4]) + (", …" if len(shapes) > 4 else "")


def describe(task: Task, data: DataSplits, outputs: Any) -> str:
    """Return a line about the task, such as "regression, outputs [N, 4], float targets [4]"."""
    parts = [task.name, task.described(), f"outputs {shown_outputs(outputs)}"]
    if (form := data.target_format) is not None:
        shown = [str(one) for one in form.forms]
        parts.append("; ".join(shown[:4]) + ("; …" if len(shown) > 4 else ""))
    elif not data.labelled:
        parts.append("no targets")
    else:
        parts.append("masks" if data.dense else "labels")
    return ", ".join(dict.fromkeys(part for part in parts if part))


def check_network(arch: str, task: Task, spec: str) -> None:
    """Check that an architecture of the registry is made for ``task``.

    Raises:
        UsageError: it is made for another task; the message names architectures that fit.
    """
    made_for = models.get(arch).task
    kinds = {task.name, *task.networks}
    if made_for in kinds:
        return
    fitting = ", ".join(name for name in models.names() if models.get(name).task in kinds)
    raise UsageError(
        f"{spec} has {task.targets}, {arch} is for {made_for}: use one of {fitting or 'your own networks'}"
    )
