"""What tests of several folders share: the environment, and the way from a small network to its file."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from ul2q.exporters.onnx.export import ExportedModel
    from ul2q.pipeline.evaluation.parity import Parity
    from ul2q.pipeline.graph.capture import Captured
    from ul2q.pipeline.graph.lower import Lowered
    from ul2q.pipeline.graph.prepare import Prepared

# Set before any test module, or a process that it starts, imports what reads it: tests send nothing and write
# to no home folder, and their tensors are so small that threads would mostly wait for each other, the more so
# as xdist starts a worker for each core. They run on CPUs, also where there is a GPU, as much is exact only
# there; `gpu_environment` is that of processes that see the GPUs again.
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
for threads in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(threads, "1")

#: Whether tests marked `pairwise` run over the full product of their parameters (see CONTRIBUTING.md).
FULL = os.environ.get("UL2Q_FULL", "") not in ("", "0")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the options of xdist that pyproject.toml sets also where it is not loaded (-p no:xdist)."""
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option, help="Ignored: pytest-xdist is not loaded.")
        parser.addoption("--no-loadscope-reorder", action="store_true", help="Ignored, too.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run a single file, or tests of it, without workers: they would take longer to start than they save."""
    files = {argument.partition("::")[0] for argument in config.args}
    return 0 if len(files) == 1 and files.pop().endswith(".py") else None


def pairwise(values: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Choose cases such that any two values of two parameters occur together in one of them.

    Greedy: each case is the first of the full product that covers the most pairs not covered yet.

    Args:
        values: the values of each parameter, at least two parameters.

    Returns:
        The cases, each with one value per parameter, in the order of ``values``.
    """

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    names = list(values)
    product = list(itertools.product(*(range(len(values[name])) for name in names)))
    missing = set().union(*map(pairs, product))
    cases = []
    while missing:
        case = max(product, key=lambda candidate: len(pairs(candidate) & missing))
        missing -= pairs(case)
        cases.append(case)
    return [tuple(values[name][i] for name, i in zip(names, case, strict=True)) for case in sorted(cases)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests marked ``pairwise``, by the full product if UL2Q_FULL is set."""
    for mark in metafunc.definition.iter_markers("pairwise"):
        values: dict[str, Sequence[Any]] = mark.kwargs
        cases = list(itertools.product(*values.values())) if FULL else pairwise(values)
        metafunc.parametrize(list(values), cases)


@pytest.fixture(scope="session", name="pairwise")
def pairwise_function() -> Callable[[Mapping[str, Sequence[Any]]], list[tuple[Any, ...]]]:
    """Return the choice of cases, for its own test."""
    return pairwise


#: folders whose files take long: they come first, so that short files fill the workers at the end
SLOW = ("e2e", "runtimes/keras", "properties", "exporters", "pipeline/kfac/test_distributed.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of `SLOW` first."""
    here = Path(__file__).parent
    items.sort(key=lambda item: not item.path.relative_to(here).as_posix().startswith(SLOW))


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection, which would traverse it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # graphs of torch.export are many small objects that live for long


@pytest.fixture(scope="session", autouse=True)
def torchlib_registered_once() -> Iterator[None]:
    """Build tables of torch.onnx once per process. Subprocesses of tests export without this."""
    if "torch" not in sys.modules:  # no collected test exports
        yield
        return
    script = runpy.run_path(str(Path(__file__).with_name("cached_torchlib.py")))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in script["patches"]():
            patch.setattr(owner, name, value)
        yield


@pytest.fixture
def measured_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure memory and time of files in this process: for tests of other things than these figures.

    A process of its own for each figure takes half a second, most of it for imports.
    """
    from ul2q.runtimes import onnxruntime as runtime

    def peak_rss(path: Path) -> int:
        runtime.session(path)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    monkeypatch.setattr(runtime, "peak_rss", peak_rss)
    monkeypatch.setattr(runtime, "bench_apart", runtime.bench)
    monkeypatch.setattr(runtime, "load_times", lambda paths: runtime.loading_times(list(map(str, paths)), 1))


@pytest.fixture
def without_float_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress without exporting the float network, a third of the time: for tests that write nothing."""
    from onnxscript import ir

    from ul2q.exporters.onnx.export import ExportedModel
    from ul2q.pipeline.compression import pipeline

    empty = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    monkeypatch.setattr(pipeline, "export_float", lambda *_: ExportedModel(empty, {}, {}))


@pytest.fixture(scope="session")
def gpu_environment() -> dict[str, str]:
    """Return the environment of processes that see the GPUs."""
    rest = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return rest if GPUS is None else rest | {"CUDA_VISIBLE_DEVICES": GPUS}


class ForkedWorkers:
    """Processes that run ``main()`` of one script, each with its own standard input and output.

    Attributes:
        pipes: what to write to and to read from, for each process.
    """

    def __init__(self, script: Path, count: int) -> None:
        inputs, outputs = ([os.pipe() for _ in range(count)] for _ in range(2))
        theirs = [(given[0], answers[1]) for given, answers in zip(inputs, outputs, strict=True)]
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("forked_worker.py")),
            str(script),
        ]
        self._process = subprocess.Popen(
            [*command, *(f"{given},{answers}" for given, answers in theirs)],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[descriptor for pair in theirs for descriptor in pair],
        )
        for pair in theirs:
            for descriptor in pair:
                os.close(descriptor)
        self.pipes: list[tuple[IO[bytes], IO[bytes]]] = [
            (os.fdopen(given[1], "wb"), os.fdopen(answers[0], "rb"))
            for given, answers in zip(inputs, outputs, strict=True)
        ]
        self._codes: dict[int, int] = {}

    def exit_code(self, number: int) -> int:
        """Wait until a process has ended and return its exit code, or its signal as a negative number."""
        assert self._process.stdout is not None
        while number not in self._codes:
            ended, code = self._process.stdout.readline().split()
            self._codes[int(ended)] = int(code)
        return self._codes[number]

    def close(self) -> None:
        """End the processes."""
        for pair in self.pipes:
            for pipe in pair:
                pipe.close()
        assert self._process.stdout is not None
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def forked_workers() -> type[ForkedWorkers]:
    """Return the class (script, count) -> processes."""
    return ForkedWorkers


@dataclass(frozen=True)
class Deployment:
    """Every stage of one network."""

    captured: Captured
    prepared: Prepared
    lowered: Lowered
    exported: ExportedModel
    path: Path
    inputs: Sequence[Tensor] = field(repr=False)

    def verify(self) -> Parity:
        """Compare the file with the lowered network on the calibration inputs, code for code."""
        from ul2q.pipeline.evaluation.parity import verify

        return verify(self.path, self.lowered, self.exported.code_tensors, [self.inputs])[0]

    def operators(self) -> set[str]:
        """Return the operators that the runtime executes."""
        from ul2q.runtimes import onnxruntime

        return set(onnxruntime.operators(self.path))


@pytest.fixture(scope="session")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Deployment]:
    """Return (module or captured, inputs, **options of QuantConfig) -> Deployment.

    Weights are rounded to nearest unless told otherwise.
    """
    from ul2q.exporters.onnx.export import export_lowered
    from ul2q.pipeline.compression.calibrate import calibrate
    from ul2q.pipeline.config import QuantConfig
    from ul2q.pipeline.graph.capture import Captured, capture
    from ul2q.pipeline.graph.lower import lower
    from ul2q.pipeline.graph.prepare import prepare

    folder = tmp_path_factory.mktemp("deployed")

    def run(network: Any, inputs: Sequence[Tensor], **options: Any) -> Deployment:
        captured = network if isinstance(network, Captured) else capture(network, inputs)
        config = QuantConfig(**{"curvature": "off", **options})
        prepared = prepare(captured, config)
        calibrate(prepared, captured.module, lambda: [tuple(inputs)])
        lowered = lower(prepared)
        exported = export_lowered(lowered, inputs, config)
        path = folder / f"{len(list(folder.iterdir()))}.onnx"
        exported.save(path)
        return Deployment(captured, prepared, lowered, exported, path, inputs)

    return run


@pytest.fixture(scope="session")
def randomise() -> Callable[[Any], Any]:
    """Return a function that gives batch norms statistics, and factors of either sign, in eval mode."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    def run(module: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        for norm in module.modules():
            if isinstance(norm, _BatchNorm):
                for tensor in (norm.running_mean, norm.weight, norm.bias):
                    if tensor is not None:
                        tensor.data.normal_(generator=generator)
                if norm.running_var is not None:
                    norm.running_var.uniform_(0.5, 2, generator=generator)
        return module.eval()

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    able = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount") is not None
    if not able or subprocess.run(mount, check=False).returncode:
        pytest.skip("making a small file system takes root on Linux")
    yield place
    subprocess.run(["umount", str(place)], check=True)
