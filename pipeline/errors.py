"""The two kinds of failure that a user sees as one line (CLI exit codes 2 and 1)."""

from __future__ import annotations


class UsageError(ValueError):
    """Wrong usage or unusable input: the message says what is wrong, where, and what to do. Exit code 2."""


class JobError(RuntimeError):
    """The job itself failed, for example a file that does not reproduce the model. Exit code 1."""
