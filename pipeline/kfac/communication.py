"""What happens when another rank cannot be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ul2q.pipeline.errors import JobError


@contextmanager
def communication() -> Iterator[None]:
    """Turn a failed collective into one clear message.

    Yields:
        Nothing.

    Raises:
        JobError: another rank has ended or cannot be reached.
    """
    try:
        yield
    except JobError:
        raise
    except RuntimeError as error:
        # gloo says "[file.cc:line] what happened. Advice": the middle is enough
        first = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise JobError(f"rank {dist.get_rank()} lost the others, this run cannot go on: {first}") from error
