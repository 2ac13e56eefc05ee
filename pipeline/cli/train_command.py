"""The ``train`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ul2q.pipeline.cli.options import (
    Crop,
    Data,
    Debug,
    Json,
    Mean,
    Overwrite,
    Quiet,
    Resize,
    Std,
    TaskName,
    Test,
    Train,
    Val,
    data_option,
    preprocess_options,
    print_json,
    shown,
    start,
    without_none,
)
from ul2q.pipeline.data.sources import registry
from ul2q.pipeline.errors import UsageError


def train(
    arch: Annotated[str, typer.Argument(metavar="ARCH", help="A network by name, for example lenet5.")],
    data: Data = None,
    train_data: Train = None,
    val: Val = None,
    test: Test = None,
    mean: Mean = None,
    std: Std = None,
    resize: Resize = None,
    crop: Crop = None,
    optimizer: Annotated[str, typer.Option(help="kfac, sgd or adam.")] = "kfac",
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Schedule and values of a paper, e.g. osawa-8192, ul2q-lenet5."),
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
    encoder_weights: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="ResNet-50 weights that the encoder of unet and the like starts from."
        ),
    ] = None,
    fisher: Annotated[
        str | None,
        typer.Option(help="Collect curvature for compress in a last pass: mc (sampled labels) or empirical."),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 for autocast.")] = "float32",
    task: TaskName = None,
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
    progress = start(quiet, debug)
    from ul2q.pipeline.config import TrainConfig
    from ul2q.pipeline.training.ranks import joined
    from ul2q.pipeline.training.train import train as run_training
    from ul2q.pipeline.training.weight_update import without_compiler

    data = data_option(data, train_data, val, test)
    if data is None:
        raise UsageError(f"`data` is missing: give {registry.choices()}")
    settings = {
        "recipe": recipe, "epochs": epochs, "batch_size": batch_size, "simulate_batch": simulate_batch,
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "mixup": mixup, "erase": erase,
        "damping": damping, "initial_damping": initial_damping, "kl_clip": kl_clip, "transport": transport,
        "refresh": int(refresh) if refresh is not None and refresh.isdecimal() else refresh,
        "rescale_weights": rescale_weights, "sync_bn": sync_bn, "fisher": fisher,
        "encoder_weights": encoder_weights, "precision": precision,
        "device": device, "task": task, **preprocess_options(mean, std, resize, crop),
    }  # fmt: skip
    config = TrainConfig(arch=arch, data=data, optimizer=optimizer, seed=seed, **without_none(settings))
    without_compiler()
    with joined(config.device) as first:
        metrics = run_training(config, output, resume=resume, overwrite=overwrite, progress=progress)
    if not first:
        return
    if as_json:
        print_json({"output": str(output), "metrics": metrics})
    else:
        typer.echo(f"{output}: {shown(metrics)}")
