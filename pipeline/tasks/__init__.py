"""Tasks: loss, metrics and targets of every kind of network, one definition each."""

from ul2q.pipeline.tasks.classification import Classification
from ul2q.pipeline.tasks.dense import Dense
from ul2q.pipeline.tasks.registry import TASKS, check_network, settle, task_for
from ul2q.pipeline.tasks.task import Task

__all__ = ["TASKS", "Classification", "Dense", "Task", "check_network", "settle", "task_for"]
