"""The ``pipeline`` command. Results go to standard output, progress and errors to standard error.

Heavy imports happen inside the commands, so that ``pipeline --help`` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from ul2q import __version__
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.options import (
    Arch,
    ArchArgs,
    Data,
    Debug,
    Json,
    OnnxFile,
    Overwrite,
    Quiet,
    TrustPickle,
    console,
    json_object,
    network_args,
    numbers,
    print_json,
    print_report,
    quant_config,
    read_text,
    shown,
    targets,
)

if TYPE_CHECKING:
    from ul2q.pipeline.progress import Progress

DONE, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="pipeline",
    help="Compress a trained PyTorch network to 1-8 bit weights that run on ONNX Runtime's integer kernels.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
_debug = False


def _start(quiet: bool, debug: bool) -> Progress:
    """Set up a command.

    Returns:
        Where the command reports its progress.
    """
    from ul2q.pipeline.progress import Progress

    global _debug  # the process runs one command
    _debug = debug
    if not debug:
        warnings.simplefilter("ignore")  # libraries' warnings are about code, and would tear the progress bar
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # likewise, read when torch is imported
    logging.getLogger("ul2q").setLevel(logging.INFO if debug else logging.WARNING)
    return Progress(quiet=quiet)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ul2q {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    arch: Annotated[str, typer.Argument(metavar="ARCH", help="A network by name, for example lenet5.")],
    data: Data = None,
    optimizer: Annotated[str, typer.Option(help="kfac, sgd or adam.")] = "kfac",
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Schedule and values of the paper's table, e.g. osawa-8192."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples computed at once, by all ranks together.")
    ] = None,
    simulate_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Samples behind one update, in several batches.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate; the optimiser's own default if left out.")
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of kfac and sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="L2 penalty.")] = None,
    mixup: Annotated[float | None, typer.Option(metavar="ALPHA", help="Running mixup; 0: none.")] = None,
    erase: Annotated[bool | None, typer.Option("--erase/--no-erase", help="Random erasing.")] = None,
    damping: Annotated[float | None, typer.Option(help="Damping of K-FAC.")] = None,
    initial_damping: Annotated[
        float | None, typer.Option(help="Damping of the first step, falling while the learning rate rises.")
    ] = None,
    kl_clip: Annotated[float | None, typer.Option(help="Norm guard of K-FAC; 0: none.")] = None,
    refresh: Annotated[
        str | None,
        typer.Option(metavar="N|adaptive", help="Steps between refreshes of K-FAC's statistics."),
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="What K-FAC sends between ranks: float32, float16 or bfloat16.")
    ] = None,
    rescale_weights: Annotated[
        bool | None,
        typer.Option("--rescale-weights/--no-rescale-weights", help="Shrink weights after every update."),
    ] = None,
    sync_bn: Annotated[
        bool, typer.Option("--sync-bn", help="Batch normalisation over the samples of all ranks.")
    ] = False,
    fisher: Annotated[
        str | None,
        typer.Option(help="Collect curvature for compress in a last pass: mc (sampled labels) or empirical."),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 for autocast.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of initialisation, order and augmentation.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the output of an interrupted run.")
    ] = False,
    overwrite: Overwrite = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="The checkpoint to write.")] = Path(
        "model.pt"
    ),
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a network and write a checkpoint. Under torchrun: on all ranks together."""
    progress = _start(quiet, debug)
    from ul2q.pipeline.config import TrainConfig
    from ul2q.pipeline.train import train as run_training
    from ul2q.pipeline.training.ranks import joined

    if data is None:
        raise UsageError("--data is missing: give digits, mnist5k or a path")
    given = {
        "recipe": recipe, "epochs": epochs, "batch_size": batch_size, "simulate_batch": simulate_batch,
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "mixup": mixup, "erase": erase,
        "damping": damping, "initial_damping": initial_damping, "kl_clip": kl_clip, "transport": transport,
        "refresh": int(refresh) if refresh is not None and refresh.isdecimal() else refresh,
        "rescale_weights": rescale_weights, "sync_bn": sync_bn, "fisher": fisher, "precision": precision,
        "device": device,
    }  # fmt: skip
    chosen = {key: value for key, value in given.items() if value is not None}
    config = TrainConfig(arch=arch, data=data, optimizer=optimizer, seed=seed, **chosen)  # type: ignore[arg-type]
    with joined(config.device) as first:
        metrics = run_training(config, output, resume=resume, overwrite=overwrite, progress=progress)
    if not first:
        return
    if as_json:
        print_json({"output": str(output), "metrics": metrics})
    else:
        typer.echo(f"{output}: {shown(metrics)}")


@app.command()
def compress(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A checkpoint or a .keras file.", show_default=False)
    ],
    wbits: Annotated[int | None, typer.Option(help="Bits of a weight, 1 to 8.")] = None,
    abits: Annotated[int | None, typer.Option(help="Bits of an activation: 8, or 32 for float.")] = None,
    arch: Arch = None,
    arch_args: ArchArgs = None,
    data: Data = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of fine-tuning: 5 up to 4 bits, else 0.")] = None,
    granularity: Annotated[str | None, typer.Option(help="One scale per tensor or per channel.")] = None,
    act_fit: Annotated[str | None, typer.Option(help="auto, normal, rectified or minmax.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Fine-tuning by adam, sgd or kfac.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the fine-tuning.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples for calibration; 0 means all.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Layers to leave in float; may be repeated.")
    ] = None,
    input_shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="Shape of one input.")] = None,
    mean: Annotated[str | None, typer.Option(metavar="M,...", help="Mean of each input channel.")] = None,
    std: Annotated[
        str | None, typer.Option(metavar="S,...", help="Standard deviation of each channel.")
    ] = None,
    resize: Annotated[int | None, typer.Option(help="Resize the shorter side of images to this.")] = None,
    crop: Annotated[int | None, typer.Option(help="Then cut out the middle square of this side.")] = None,
    opset: Annotated[int | None, typer.Option(help="ONNX opset of the file.")] = None,
    storage: Annotated[str | None, typer.Option(help="table, or int2 for typed tensors.")] = None,
    to: Annotated[str, typer.Option(help="What to write: onnx, or onnx,keras.")] = "onnx",
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A config.json; options given here come first.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: MODEL-w<K>a<A> beside it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list the layers, write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Quantise a trained network, export it, check it in ONNX Runtime, and report what it costs."""
    progress = _start(quiet, debug)
    from ul2q.pipeline.compress import compress_file

    given = {
        "wbits": wbits, "abits": abits, "epochs": epochs, "granularity": granularity, "act_fit": act_fit,
        "optimizer": optimizer, "lr": lr, "batch_size": batch_size, "samples": samples,
        "exclude": exclude or None, "opset": opset, "storage": storage, "seed": seed,
    }  # fmt: skip
    preprocess = {
        "mean": numbers(mean, "--mean", float),
        "std": numbers(std, "--std", float),
        "resize": resize,
        "crop": crop,
    }
    result = compress_file(
        model,
        quant_config(config, {key: value for key, value in given.items() if value is not None}),
        data=data,
        arch=arch,
        arch_args=network_args(arch_args),
        input_shape=numbers(input_shape, "--input-shape", int),
        preprocess={key: value for key, value in preprocess.items() if value is not None} or None,
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        trust_pickle=trust_pickle,
        to=targets(to, {"onnx", "keras"}),
        progress=progress,
    )
    print_report(result.report, as_json)
    if not (as_json or dry_run):
        typer.echo(f"written: {result.directory}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compress wrote.", show_default=False)],
    to: Annotated[str, typer.Option(help="keras: writes DIR/model.keras.")] = "keras",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the model of a folder in another format."""
    _start(quiet, debug)
    from ul2q.pipeline.files import check_output
    from ul2q.pipeline.mirror import write_mirror

    targets(to, {"keras"})
    output = folder / "model.keras"
    check_output(output, overwrite=overwrite)
    write_mirror(folder / "model.onnx", output)
    typer.echo(f"written: {output}, {output.stat().st_size:,} bytes")


@app.command()
def evaluate(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="MODEL.onnx, MODEL.keras or a checkpoint.", show_default=False),
    ],
    data: Data = None,
    arch: Arch = None,
    arch_args: ArchArgs = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the accuracy on the test samples."""
    progress = _start(quiet, debug)
    from ul2q.pipeline.evaluate import evaluate_file

    result = evaluate_file(
        model,
        data,
        arch=arch,
        arch_args=network_args(arch_args),
        trust_pickle=trust_pickle,
        progress=progress,
    )
    if as_json:
        print_json(result)
        return
    top5 = "" if result["top5"] is None else f", top5 {100 * result['top5']:.2f} %"
    typer.echo(f"top1 {100 * result['top1']:.2f} %{top5} on {result['samples']:,} test samples")


@app.command()
def run(
    model: OnnxFile,
    inputs: Annotated[
        Path,
        typer.Option("--input", metavar="X", help="A .npy file [N, ...], an image, or a folder of images."),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.npy", help="Write the model's output here.")
    ] = None,
    low_memory: Annotated[
        bool,
        typer.Option("--low-memory", help="Run one sample at a time and keep no memory in between; slower."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a model on inputs.

    Images and byte arrays are preprocessed as the file says; a .npy of floating-point numbers is taken as the
    model's input itself.
    """
    _start(quiet, debug)
    from ul2q.pipeline.evaluate import run_file, save_array
    from ul2q.pipeline.files import check_output

    if output is not None:
        check_output(output, overwrite=True)
    values = run_file(model, inputs, low_memory=low_memory)
    if output is not None:
        save_array(output, values)
    answers = values.argmax(1).tolist() if values.ndim == 2 else None
    if as_json:
        print_json({"samples": len(values), "shape": list(values.shape), "argmax": answers})
    elif output is not None:
        typer.echo(f"{output}: {list(values.shape)}")
    elif answers is not None:
        for i, answer in enumerate(answers):
            typer.echo(f"{i}: class {answer}, score {values[i, answer]:.4g}")
    else:
        typer.echo(f"output {list(values.shape)}: give -o OUT.npy to keep it")


@app.command()
def bench(
    model: OnnxFile,
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER.onnx", help="A model to compare with.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads within an operator.")] = 1,
    runs: Annotated[int, typer.Option(help="Timed calls of each model.")] = 200,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the time of one sample in ONNX Runtime; two models take turns, so that their ratio is fair."""
    _start(quiet, debug)
    from ul2q.runtimes import onnxruntime as runtime

    result = runtime.bench(model, against, threads=threads, runs=runs)
    if as_json:
        print_json(result)
        return
    typer.echo(f"{model}: median {result['median_ms']:.3f} ms, 95th percentile {result['p95_ms']:.3f} ms")
    if against is not None:
        typer.echo(f"{against}: median {result['against_median_ms']:.3f} ms; ratio {result['ratio']:.3f}")
    typer.echo("executes " + ", ".join(f"{count} {name}" for name, count in result["operators"].items()))


@app.command()
def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="MODEL.onnx or a checkpoint.", show_default=False)
    ],
    arch: Arch = None,
    arch_args: ArchArgs = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show the layers of a model: bits, α, β, bytes."""
    _start(quiet, debug)
    from ul2q.pipeline.describe import describe, describe_tables

    description = describe(model, arch=arch, arch_args=network_args(arch_args), trust_pickle=trust_pickle)
    if as_json:
        print_json(description)
    else:
        describe_tables(description, console())


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compress wrote.", show_default=False)],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a report again."""
    _start(quiet, debug)
    from ul2q.pipeline.report.render import markdown as to_markdown
    from ul2q.pipeline.report.schema import complete

    path = folder / "report.json"
    values = json_object(read_text(path, "a folder that compress wrote"), str(path))
    try:
        checked = complete(values)
    except UsageError as error:
        raise UsageError(f"{path} was not written by this version: {error}") from error
    if markdown:
        typer.echo(to_markdown(checked), nl=False)
    else:
        print_report(dict(checked), as_json)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where to write.")] = Path(
        "demo"
    ),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train LeNet-5 on 3,500 real handwritten digits, then compress it to 2-bit weights."""
    progress = _start(quiet, debug)
    from ul2q.pipeline.compress import compress_file
    from ul2q.pipeline.config import QuantConfig, TrainConfig
    from ul2q.pipeline.train import train as run_training

    checkpoint, compressed = output / "model.pt", output / "model-w2a8"
    if not overwrite and (checkpoint.exists() or compressed.exists()):
        raise UsageError(f"{output} holds an earlier demo: give --overwrite, or another -o")
    output.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(arch="lenet5", data="mnist5k", optimizer="kfac", seed=0)
    metrics = run_training(config, checkpoint, resume=False, overwrite=overwrite, progress=progress)
    typer.echo(f"{checkpoint}: {shown(metrics)}")
    result = compress_file(
        checkpoint, QuantConfig(wbits=2, abits=8), output=compressed, overwrite=overwrite, progress=progress
    )
    print_report(result.report, as_json=False)
    typer.echo(f"written: {result.directory}")


@app.command()
def doctor(as_json: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show the versions of what this installation runs on."""
    _start(quiet, debug)
    import importlib.metadata as installed
    import platform

    found = {"ul2q": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "keras", "tensorflow-cpu"):
        try:
            found[name] = installed.version(name)
        except installed.PackageNotFoundError:
            found[name] = "not installed"
    found["cores"] = str(os.cpu_count())
    if as_json:
        print_json(found)
    else:
        for name, version in found.items():
            typer.echo(f"{name:15} {version}")


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A fault of the program, not of its input: still one line, since the trace helps only who asks for it.
    if _debug or not isinstance(error, Exception):
        sys.__excepthook__(kind, error, trace)
        return
    first = (str(error).strip().splitlines() or [""])[0]
    _say(f"error: unexpected {kind.__name__}: {first}; run again with --debug for the whole trace")


def _say(line: str) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from ul2q.pipeline.training.ranks import may_speak

        if not may_speak():
            return
    if _debug:
        traceback.print_exc()
    typer.echo(" ".join(line.split("\n")), err=True)


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: those of the process).

    Returns:
        The exit code: 0 done, 1 the job failed, 2 wrong usage or unusable input, 130 interrupted.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="pipeline", standalone_mode=False)
    except UsageError as error:
        _say(f"error: {error}")
        return UNUSABLE
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f"{'pipeline' if context is None else context.command_path} --help"
        _say(f"error: {error.format_message().rstrip('.')}; see {hint}")
        return UNUSABLE
    except (
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
        PermissionError,
    ) as error:
        _say(f"error: {error.filename or 'a file'}: {error.strerror or error}")
        return UNUSABLE
    except (JobError, OSError, MemoryError) as error:
        _say(f"error: {error or 'out of memory'}")
        return FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _say("interrupted: earlier outputs are as they were")
    return int(code or DONE)


def main() -> None:
    """Run the command and end the process with its exit code."""
    sys.excepthook = _unexpected
    sys.exit(execute())
