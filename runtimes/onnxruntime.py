"""Run, inspect and measure ONNX files in ONNX Runtime on the CPU. Needs NumPy, ONNX and ONNX Runtime only.

Arrays are [N, ...]: the first dimension of every input and output is the batch.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

from ul2q.pipeline.errors import JobError, UsageError, quantity
from ul2q.runtimes.cpu import kernels_saturate
from ul2q.runtimes.memory import own_peak_rss
from ul2q.runtimes.model_inputs import Array, checked_feeds, example_input
from ul2q.runtimes.model_inputs import numpy_type as numpy_type
from ul2q.runtimes.onnx_files import (
    Model,
    data_files,
    file_bytes,
    first_line,
    load_model,
    metadata,
    readable_file,
    with_outputs,
)

__all__ = [
    "ACCURATE", "Model", "bench", "bench_apart", "data_files", "file_bytes", "load_and_run_once",
    "load_model", "load_times", "loading_times", "metadata", "operators", "outputs", "own_peak_rss",
    "peak_rss", "run", "session", "time_shares", "with_outputs",
]  # fmt: skip

#: session option with which int8 weights beyond +-64 run on kernels of uint8 weights, exact on every x86 CPU
ACCURATE = "session.x64quantprecision"
_OPTIMIZED = "session.optimized_model_external_initializers"
#: timed calls of a model whose median is worth a figure
LEAST_RUNS = 20
_REFUSED = 2  # exit status of a process that raised UsageError
_FATAL = 4  # the runtime prints nothing less: what it refuses, it raises
_LOAD_ERRORS = (
    state.Fail,
    state.InvalidArgument,
    state.InvalidGraph,
    state.InvalidProtobuf,
    state.NoSuchFile,
    state.NotImplemented,
    state.RuntimeException,
)
_RUN_ERRORS = (
    state.Fail, state.InvalidArgument, state.NotImplemented, state.RuntimeException, UnicodeDecodeError,
)  # fmt: skip


def _options(
    threads: int | None, low_memory: bool, spinning: bool, optimized_path: Path | None, folder: Path | None,
    accurate: bool | None,
) -> ort.SessionOptions:  # fmt: skip
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    if kernels_saturate() if accurate is None else accurate:
        options.add_session_config_entry(ACCURATE, "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if low_memory:
        options.enable_cpu_mem_arena = False
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
        # the graph is what is wanted; tensors beyond 2 GB would not fit the file
        options.add_session_config_entry(f"{_OPTIMIZED}_file_name", f"{optimized_path.name}.data")
        options.add_session_config_entry(f"{_OPTIMIZED}_min_size_in_bytes", "1024")
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def session(
    model: Model,
    threads: int | None = None,
    *,
    low_memory: bool = False,
    spinning: bool = True,
    optimized_path: Path | None = None,
    profile: Path | None = None,
    folder: Path | None = None,
    accurate: bool | None = None,
) -> ort.InferenceSession:
    """Load ``model`` on the CPU.

    Args:
        model: a path, serialised bytes, or a model in memory.
        threads: threads within an operator; None lets the runtime use all cores.
        low_memory: free the memory of activations after every operator; see ``large_blocks_returned``, too.
        spinning: idle threads spin for a while before they sleep, which is faster for one session alone.
        optimized_path: where to write the graph that the runtime made of the model.
        profile: beginning of the path to which ``end_profiling`` writes the times of all operators.
        folder: where the data files of a model in memory lie.
        accurate: set the option `ACCURATE`. False gives a plain session, as other programs make them. None
            sets it where the CPU's kernels saturate: files of other programs, and of versions of ul2q that
            stored weights beyond +-64 as int8, need it there.

    Returns:
        The session.

    Raises:
        UsageError: the file is missing, not ONNX, or truncated, or this ONNX Runtime cannot load it.
    """
    options = _options(threads, low_memory, spinning, optimized_path, folder, accurate)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if isinstance(model, onnx.ModelProto):
        name, source = "the model", model.SerializeToString()
    elif isinstance(model, bytes):
        name, source = "the model", model
    else:
        readable_file(Path(model))
        name, source = str(model), str(model)
    try:
        # its fallback would print, and try the same once more
        live = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        for value in (*live.get_inputs(), *live.get_outputs()):
            _ = value.name, value.shape  # whose names may be any bytes in a damaged file
    except (state.InvalidProtobuf, UnicodeDecodeError) as error:  # the runtime's message quotes any bytes
        raise UsageError(f"{name} is not an ONNX file, or it is truncated: export it again") from error
    except _LOAD_ERRORS as error:
        if not isinstance(model, onnx.ModelProto | bytes):
            data_files(model)  # which says what is wrong with them in plain words
        raise UsageError(f"ONNX Runtime {ort.__version__} cannot load {name}: {first_line(error)}") from error
    return live


def run(
    live: ort.InferenceSession, inputs: npt.ArrayLike | Mapping[str, npt.ArrayLike], batch: int = 256
) -> dict[str, Array]:
    """Run a session over all samples, ``batch`` at a time.

    Args:
        live: from ``session``.
        inputs: [N, ...] for a model with one input, else one such array per input name.
        batch: samples per call; a model with a fixed batch size is called with that size.

    Returns:
        Every output of the model by name, [N, ...].

    Raises:
        UsageError: an input does not fit the model.
        JobError: the runtime failed, or an output has no batch dimension.
    """
    feeds = checked_feeds(live, inputs)
    samples = len(next(iter(feeds.values())))
    fixed = next((spec.shape[0] for spec in live.get_inputs() if isinstance(spec.shape[0], int)), None)
    if fixed and samples % fixed:
        raise UsageError(
            f"the model takes exactly {quantity(fixed, 'sample')} at a time, given are {samples}"
        )
    step = fixed or batch
    names = [output.name for output in live.get_outputs()]
    parts: list[list[Array]] = []
    for start in range(0, samples, step):
        part = {name: x[start : start + step] for name, x in feeds.items()}
        try:
            parts.append(live.run(names, part))
        except _RUN_ERRORS as error:
            raise JobError(f"ONNX Runtime stopped at samples {start}..: {first_line(error)}") from error
    for name, value in zip(names, parts[0], strict=True):
        if value.shape[:1] != (min(step, samples),):
            raise JobError(
                f"output {name!r} has shape {list(value.shape)}: its first dimension is not the batch"
            )
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(names)}


def outputs(
    model: Model,
    names: Sequence[str],
    inputs: npt.ArrayLike | Mapping[str, npt.ArrayLike],
    *,
    batch: int = 256,
    threads: int | None = None,
    accurate: bool | None = None,
) -> dict[str, Array]:
    """Run a copy of ``model`` that also gives the tensors ``names`` from inside it.

    Args:
        model: a path, serialised bytes, or a model.
        names: tensors of the graph, for example outputs of QuantizeLinear; the runtime keeps them apart
            from its fusions only where a fusion would swallow them, so choose tensors at which fused
            operators begin and end.
        inputs: as for ``run``.
        batch: samples per call.
        threads: as for ``session``.
        accurate: as for ``session``.

    Returns:
        The tensors ``names``, [N, ...], in that order.

    Raises:
        UsageError: the model has no such tensor, or see ``session`` and ``run``.
    """
    copy, folder = with_outputs(model, names)
    made = {name for node in copy.graph.node for name in node.output}
    if missing := [name for name in names if name not in made]:
        raise UsageError(f"the model has no tensors {missing}")
    values = run(session(copy, threads, folder=folder, accurate=accurate), inputs, batch)
    return {name: values[name] for name in names}


def operators(model: Model) -> dict[str, int]:
    """Count the operators that ONNX Runtime really executes, after its own optimisation.

    Returns:
        Operator type to number of nodes, most frequent first.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        session(model, 1, optimized_path=path)
        graph = onnx.load(path, load_external_data=False).graph
    counts = Counter(node.op_type for node in graph.node)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def time_shares(
    model: Model, inputs: Mapping[str, Array] | None = None, *, threads: int = 1, runs: int = 20
) -> dict[str, float]:
    """Measure which part of the time of one sample each kind of operator takes, by the runtime's profile.

    Args:
        model: the model.
        inputs: what to feed; drawn at random if None.
        threads: threads within an operator.
        runs: profiled calls.

    Returns:
        Operator type to its part of the time of all operators, largest first.

    Raises:
        UsageError: see ``session`` and ``example_input``.
    """
    with tempfile.TemporaryDirectory() as folder:
        live = session(model, threads, spinning=False, profile=Path(folder) / "profile")
        feeds = inputs if inputs is not None else example_input(live)
        for _ in range(runs):
            live.run(None, feeds)
        events = json.loads(Path(live.end_profiling()).read_text())
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["name"], event["args"]["op_name"]].append(event["dur"])  # in whole microseconds
    spent: Counter[str] = Counter()
    for (_, operator), durations in times.items():
        spent[operator] += float(np.median(durations))  # type: ignore[assignment]
    total = spent.total()
    return {name: time / total for name, time in spent.most_common()} if total else {}


def bench(
    model: Model,
    against: Model | None = None,
    *,
    threads: int = 1,
    runs: int = 100,
    enough_seconds: float = math.inf,
    inputs: Mapping[str, Array] | None = None,
) -> dict[str, Any]:
    """Measure the time of one call with one sample, and the ratio to another model.

    Both models take turns in one process, in changing order, and idle threads do not spin, so that drifting
    clock speeds and the other model's threads weigh on both alike.

    Args:
        model: the model to measure.
        against: the model to compare with.
        threads: threads within an operator.
        runs: timed calls of each model.
        enough_seconds: time after which `LEAST_RUNS` timed calls of each model are enough.
        inputs: what to feed; drawn at random if None.

    Returns:
        ``median_ms``, ``p95_ms``, ``against_median_ms`` and ``ratio`` (``model`` / ``against``, null without
        one), ``threads``, ``runs``, ``operators`` (see ``operators``) and ``shares`` (see ``time_shares``).

    Raises:
        UsageError: ``runs`` or ``threads`` is not positive, or see ``session`` and ``example_input``.
    """
    if runs < 1 or threads < 1:
        raise UsageError(f"`runs` is {runs} and `threads` is {threads}: both must be at least 1")
    live = [session(m, threads, spinning=False) for m in (model, against) if m is not None]
    feeds = [inputs if inputs is not None else example_input(one) for one in live]
    seconds: list[list[float]] = [[] for _ in live]
    warm_up = max(3, min(runs, LEAST_RUNS) // 5)
    start = time.perf_counter()
    for turn in range(-warm_up, runs):
        if turn >= LEAST_RUNS and time.perf_counter() - start > enough_seconds:
            break
        order = range(len(live)) if turn % 2 else reversed(range(len(live)))
        for i in order:
            begin = time.perf_counter()
            live[i].run(None, feeds[i])
            if turn >= 0:
                seconds[i].append(time.perf_counter() - begin)
    medians = [1e3 * float(np.median(times)) for times in seconds]
    return {
        "median_ms": medians[0],
        "p95_ms": 1e3 * float(np.percentile(seconds[0], 95)),
        "against_median_ms": medians[1] if against is not None else None,
        "ratio": medians[0] / medians[1] if against is not None else None,
        "threads": threads,
        "runs": len(seconds[0]),
        "operators": operators(model),
        "shares": time_shares(model, feeds[0], threads=threads),
    }


def load_and_run_once(path: str, low_memory: bool) -> int:
    """Load ``path`` and run it once with one sample: what ``peak_rss`` does in a new process.

    Returns:
        This process's peak resident memory in bytes.
    """
    live = session(path, 1, low_memory=low_memory)
    live.run(None, example_input(live))
    return own_peak_rss()


def peak_rss(path: Path | str, *, low_memory: bool = False) -> int:
    """Measure the memory that loading ``path`` and running it once takes, in a process of its own.

    Args:
        path: an ONNX file.
        low_memory: as for ``session``.

    Returns:
        Peak resident memory of the whole process in bytes: Python, the runtime's libraries and the model.

    Raises:
        JobError: the process failed.
        UsageError: the file is missing, not ONNX, or truncated.
    """
    return int(_apart(f"memory of {path}", load_and_run_once, path=str(path), low_memory=low_memory))


def bench_apart(
    path: Path | str,
    against: Path | str,
    *,
    threads: int = 1,
    runs: int = 100,
    enough_seconds: float = math.inf,
) -> dict[str, Any]:
    """Do what `bench` does in a process of its own, whose memory is its own, too.

    Returns:
        See `bench`.

    Raises:
        JobError: the process failed.
        UsageError: a file is missing, not ONNX, or truncated.
    """
    measured: dict[str, Any] = _apart(
        f"time of {path}", bench, model=str(path), against=str(against), threads=threads, runs=runs,
        enough_seconds=enough_seconds,
    )  # fmt: skip
    return measured


def loading_times(paths: Sequence[str], runs: int) -> list[float]:
    """Load every file ``runs`` times, in alternation: what `load_times` does in a new process.

    Returns:
        The median of each file in ms.
    """
    seconds: list[list[float]] = [[] for _ in paths]
    for _ in range(runs):
        for path, times in zip(paths, seconds, strict=True):
            begin = time.perf_counter()
            session(path, 1)
            times.append(time.perf_counter() - begin)
    return [1e3 * float(np.median(times)) for times in seconds]


def load_times(paths: Sequence[Path | str], *, runs: int = 5) -> list[float]:
    """Measure the time that loading each file takes, in a process of its own.

    Args:
        paths: ONNX files.
        runs: how often each is loaded, on one thread; the files take turns.

    Returns:
        The median of each file in ms.

    Raises:
        JobError: the process failed.
        UsageError: a file is missing, not ONNX, or truncated.
    """
    names = [str(path) for path in paths]
    times: list[float] = _apart(f"loading {names[0]}", loading_times, paths=names, runs=runs)
    return times


def _apart(what: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a function of this module gives, called in a process of its own.

    Raises:
        JobError: the process failed.
        UsageError: the function raised it.
    """
    code = (
        f"import {__name__} as r, json, sys\n"
        "try:\n    print(json.dumps(getattr(r, sys.argv[1])(**json.loads(sys.argv[2]))))\n"
        f"except r.UsageError as error:\n    print(error, file=sys.stderr)\n    sys.exit({_REFUSED})"
    )
    command = [sys.executable, "-c", code, function.__name__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
        if done.returncode == _REFUSED:
            raise UsageError(reason)
        raise JobError(f"{what} could not be measured: {reason}")
    return json.loads(done.stdout)
