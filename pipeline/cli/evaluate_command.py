"""The commands that use a model file: measure its accuracy, run it, time it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ul2q.pipeline.cli.options import (
    Arch,
    ArchArgs,
    Crop,
    Data,
    Debug,
    Ignore,
    Json,
    Mean,
    OnnxFile,
    Quiet,
    Resize,
    Std,
    TaskName,
    TestOnly,
    TrustPickle,
    Weights,
    data_option,
    model_source,
    preprocess_options,
    print_json,
    start,
)
from ul2q.pipeline.config import AUTO_TASK
from ul2q.pipeline.errors import quantity

# Numbers of a sample that `run` prints.
_SHOWN_NUMBERS = 16


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="MODEL.onnx, MODEL.keras or a checkpoint.", show_default=False),
    ],
    data: Data = None,
    test: TestOnly = None,
    task: TaskName = None,
    mean: Mean = None,
    std: Std = None,
    resize: Resize = None,
    crop: Crop = None,
    arch: Arch = None,
    arch_args: ArchArgs = None,
    weights: Weights = None,
    ignore: Ignore = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the accuracy on the test samples, or the metrics of the task that the data are for."""
    progress = start(quiet, debug)
    from ul2q.pipeline.evaluation.evaluate import evaluate_file

    result = evaluate_file(
        model_source(model, arch, arch_args, trust_pickle, weights, ignore),
        data_option(data, train=test, test=test),
        changes=preprocess_options(mean, std, resize, crop),
        task=task or AUTO_TASK,
        progress=progress,
    )
    if as_json:
        print_json(result)
        return
    shares = [f"{name} {100 * result[name]:.2f} %" for name in ("top1", "top5") if result[name] is not None]
    errors = [f"{name} {value:.4f}" for name, value in result["metrics"].items()]
    note = f" ({result['note']})" if result["note"] else ""
    typer.echo(f"{', '.join(shares + errors)} on {quantity(result['samples'], 'test sample')}{note}")


def run(
    model: OnnxFile,
    inputs: Annotated[
        Path,
        typer.Option("--input", metavar="X", help="A .npy file [N, ...], an image, or a folder of images."),
    ],
    mean: Mean = None,
    std: Std = None,
    resize: Resize = None,
    crop: Crop = None,
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
    progress = start(quiet, debug)
    from ul2q.pipeline.evaluation.evaluate import (
        answers_classes,
        class_names,
        probabilities,
        run_file,
        save_array,
    )
    from ul2q.pipeline.storage.atomic import check_output

    if output is not None:
        check_output(output, overwrite=True)
    changes = preprocess_options(mean, std, resize, crop)
    values = run_file(model, inputs, changes=changes, low_memory=low_memory, progress=progress)
    if output is not None:
        save_array(output, values)
    answers = values.argmax(1).tolist() if values.ndim == 2 and answers_classes(model) else None
    names = class_names(model)
    named = answers is not None and len(names) == values.shape[1]
    shares = probabilities(values).max(1).tolist() if named else None
    if as_json:
        document = {"samples": len(values), "shape": list(values.shape), "argmax": answers}
        about = {"classes": [names[i] for i in answers or []], "probabilities": shares} if named else {}
        print_json(document | about)
    elif output is not None:
        typer.echo(f"{output}: {list(values.shape)}")
    elif answers is not None:
        for i, answer in enumerate(answers):
            known = f"{names[answer]}, {100 * shares[i]:.1f} %" if shares else ""
            typer.echo(f"{i}: {known or f'class {answer}, score {values[i, answer]:.4g}'}")
    elif values.ndim == 2 and values.shape[1] <= _SHOWN_NUMBERS:
        for i, row in enumerate(values):
            typer.echo(f"{i}: {', '.join(f'{value:.6g}' for value in row)}")
    else:
        typer.echo(f"output {list(values.shape)}: give -o OUT.npy to keep it")


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
    start(quiet, debug)
    from ul2q.runtimes import onnxruntime as runtime

    result = runtime.bench(model, against, threads=threads, runs=runs)
    if as_json:
        print_json(result)
        return
    typer.echo(f"{model}: median {result['median_ms']:.3f} ms, 95th percentile {result['p95_ms']:.3f} ms")
    if against is not None:
        typer.echo(f"{against}: median {result['against_median_ms']:.3f} ms; ratio {result['ratio']:.3f}")
    typer.echo("executes " + ", ".join(f"{count} {name}" for name, count in result["operators"].items()))
