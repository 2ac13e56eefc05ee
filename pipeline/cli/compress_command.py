"""The commands that make compressed models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    Overwrite,
    Quiet,
    Resize,
    Std,
    TaskName,
    Test,
    Train,
    TrustPickle,
    Val,
    Weights,
    data_option,
    json_object,
    model_source,
    numbers,
    preprocess_options,
    print_report,
    quant_config,
    read_text,
    shown,
    start,
    widths,
    without_none,
)
from ul2q.pipeline.compression.output_formats.registry import FORMATS, converted_formats, requested_names
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.quantize.registry import quantizer_help


def compress(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint, or a float .onnx or .keras file; --config alone takes that of its run.",
            show_default=False,
        ),
    ] = None,
    wbits: Annotated[
        str | None,
        typer.Option(
            metavar="BITS",
            help="Bits of a weight, 1 to 8; or by layer name: 'conv1=8,head*=4,*=2', the first match counts.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Choose the width of every layer, up to --wbits, for a file of at most this size: 300KB, or "
            "10% of the float file.",
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            help="Choose the smallest widths, up to --wbits, that lower the score on validation samples by "
            "at most so many points before fine-tuning.",
        ),
    ] = None,
    abits: Annotated[int | None, typer.Option(help="Bits of an activation: 8, or 32 for float.")] = None,
    arch: Arch = None,
    arch_args: ArchArgs = None,
    weights: Weights = None,
    ignore: Ignore = None,
    data: Data = None,
    train: Train = None,
    val: Val = None,
    test: Test = None,
    task: TaskName = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of fine-tuning: 5 up to 4 bits, else 0.")] = None,
    step: Annotated[
        str | None, typer.Option(help="Step of the weights: auto, paper (λ*σ), mse or minmax.")
    ] = None,
    granularity: Annotated[
        str | None, typer.Option(help="One scale per tensor or per channel; auto chooses by layer.")
    ] = None,
    curvature: Annotated[
        str | None,
        typer.Option(help="auto rounds weights so that errors cancel in a layer's output; off: nearest."),
    ] = None,
    act_fit: Annotated[str | None, typer.Option(help="auto, normal, rectified or minmax.")] = None,
    quantizer: Annotated[str | None, typer.Option(help=quantizer_help())] = None,
    optimizer: Annotated[str | None, typer.Option(help="Fine-tuning by adam, sgd or kfac.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the fine-tuning.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples for calibration; 0 means all.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Layers to leave in float; may be repeated.")
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:AXES", help="Axes to leave open, such as x:2,3; may be repeated."),
    ] = None,
    input_shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="Shape of one input.")] = None,
    mean: Mean = None,
    std: Std = None,
    resize: Resize = None,
    crop: Crop = None,
    opset: Annotated[int | None, typer.Option(help="ONNX opset of the file.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="table: k bits a weight; fast: a byte, loads sooner; int2: typed tensors."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="8-bit weights for any CPU: exact stores them unsigned where needed, which is slower; "
            "portable keeps full speed at the precision of 7 bits."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help=f"Formats to write, separated by commas: {', '.join(FORMATS)}. Default: onnx."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A config.json; options given here come first. Without MODEL it repeats the whole run.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: MODEL-w<K>a<A> beside it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list the layers, write nothing.")
    ] = False,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Without any data: draw inputs from the batch norms' statistics."),
    ] = False,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same options.")
    ] = False,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Quantise a trained network, export it, check it in ONNX Runtime, and report what it costs."""
    progress = start(quiet, debug)
    from ul2q.pipeline.compression.compress import compress_file

    overrides = {
        **widths(wbits), "abits": abits, "epochs": epochs, "step": step, "granularity": granularity,
        "curvature": curvature, "act_fit": act_fit, "quantizer": quantizer, "task": task,
        "optimizer": optimizer, "lr": lr, "batch_size": batch_size, "samples": samples,
        "exclude": exclude or None, "dynamic": dynamic or None, "opset": opset, "storage": storage,
        "target": target, "seed": seed, "budget": budget, "max_drop": max_drop,
    }  # fmt: skip
    given = {
        "data": data_option(data, train, val, test),
        "input_shape": numbers(input_shape, "--input-shape", int),
        "preprocess": preprocess_options(mean, std, resize, crop) or None,
        "synthetic": synthetic or None,
        "to": to,
    }
    if model is not None:
        source, inputs = (
            model_source(model, arch, arch_args, trust_pickle, weights, ignore),
            without_none(given),
        )
    else:
        source, inputs = _repeated(config, without_none(given), trust_pickle)
    result = compress_file(
        source,
        quant_config(config, without_none(overrides)),
        output=output,
        overwrite=overwrite,
        resume=resume,
        dry_run=dry_run,
        progress=progress,
        **inputs,
    )
    print_report(result.report, as_json)
    if not (as_json or dry_run):
        typer.echo(f"written: {result.directory}")


def _repeated(
    config: Path | None, given: dict[str, Any], trust_pickle: bool
) -> tuple[ModelSource, dict[str, Any]]:
    """Return the network and the samples of the run that ``config`` records; ``given`` options come first.

    Raises:
        UsageError: it names none.
    """
    from ul2q.pipeline.compression.run_record import repeated_run

    if config is None:
        raise UsageError("MODEL is missing: give a checkpoint, or a config.json as `config`")
    values = json_object(read_text(config, "a config.json"), str(config))
    run = repeated_run(values, config, trust_pickle=trust_pickle)
    inputs = {"data": run.data, "input_shape": run.input_shape, "synthetic": run.synthetic, "to": run.to}
    if "data" in given or "synthetic" in given:  # one takes the place of the other
        inputs |= {"data": None, "synthetic": False}
    preprocess = {**run.preprocess, **given.pop("preprocess", {})}
    return run.source, {**inputs, **given, "preprocess": preprocess}


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compress wrote.", show_default=False)],
    to: Annotated[
        str, typer.Option(help=f"Formats to write, separated by commas: {', '.join(converted_formats())}.")
    ] = "keras",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the model of a folder in another format."""
    start(quiet, debug)
    from ul2q.pipeline.storage.atomic import check_output

    formats = [FORMATS[name] for name in requested_names(to, converted_formats())]
    for output_format in formats:
        check_output(folder / output_format.file_name, overwrite=overwrite)
    for output_format in formats:
        written = output_format.write(folder / "model.onnx", folder / output_format.file_name)
        typer.echo(f"written: {written.path}, {written.bytes:,} bytes")


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where to write.")] = Path(
        "demo"
    ),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train LeNet-5 on 3,500 real handwritten digits, then compress it to 2-bit weights."""
    progress = start(quiet, debug)
    from ul2q.pipeline.compression.compress import compress_file
    from ul2q.pipeline.config import QuantConfig, TrainConfig
    from ul2q.pipeline.training.train import train as run_training

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
