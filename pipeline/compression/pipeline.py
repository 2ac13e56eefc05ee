"""The stages of a run in their order: capture → prepare → calibrate → fine-tune → lower → export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ul2q.exporters.onnx.export import export_float, export_lowered
from ul2q.pipeline.compression.calibrate import compared_samples
from ul2q.pipeline.compression.finetune import as_it_takes_effect, with_lower_rate
from ul2q.pipeline.compression.output_formats.base import OutputFormat
from ul2q.pipeline.compression.report_fields import network_report, planned_report
from ul2q.pipeline.compression.result import CompressedModel
from ul2q.pipeline.compression.run_state import CompressedNetwork, Run
from ul2q.pipeline.compression.size_limits import allocate_widths
from ul2q.pipeline.compression.stages import (
    calibrate_network,
    capture_network,
    finetune_network,
    with_task,
)
from ul2q.pipeline.compression.width_allocation import loss_growth
from ul2q.pipeline.evaluation import measure
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.graph.capture import Captured
from ul2q.pipeline.graph.lower import lower
from ul2q.pipeline.graph.prepare import prepare
from ul2q.pipeline.quantize.registry import QUANTIZERS
from ul2q.pipeline.report.schema import Report
from ul2q.pipeline.tasks import Classification


def run_stages(run: Run, formats: Sequence[OutputFormat] = ()) -> CompressedModel:
    """Compress the network of a run.

    Args:
        run: the run.
        formats: output formats that must be able to hold the network.

    Returns:
        The compressed network, not yet written.
    """
    given = with_lower_rate(run.config) if run.is_synthetic else run.config
    run, allocation = replace(run, config=as_it_takes_effect(given)), None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed)
        with run.stage("capture"):
            run, captured = capture_network(run)
        run = with_task(run, captured)
        metadata = _metadata(run, captured)
        with run.stage("prepare"):
            prepared = prepare(captured, run.config)
            # Before anything else, to learn whether torch.onnx can write the network's operators.
            exported_float = export_float(captured, run.example(), run.config.opset, metadata)
            if run.resume is None or run.resume.finished is None:
                for output_format in formats:
                    output_format.check_network(prepared, run.example(), run.config)
        if given.chooses_widths:
            with run.stage("choose widths"):
                float_bytes = len(exported_float.to_bytes())
                run, allocation = allocate_widths(run, prepared, captured, given, float_bytes, metadata)
                prepared = prepare(captured, run.config)
        with run.stage("calibrate"):
            batch_norm = calibrate_network(run, captured, prepared)
        with run.stage("finetune"):
            epochs = finetune_network(run, captured, prepared, batch_norm)
        with run.stage("lower"):
            lowered = lower(prepared)
        with run.stage("export"):
            exported = export_lowered(lowered, run.example(), run.config, metadata)
    if allocation is not None:
        grown = loss_growth(lowered.module, captured.module, compared_samples(run.calibration), run.task)
        allocation = replace(allocation, measured_loss=grown)
    warnings = [*run.notes, *captured.notes, *measure.constant_channels(lowered.weights)]
    if note := QUANTIZERS[run.config.quantizer].note:
        warnings.append(note)
    network = CompressedNetwork(
        prepared, lowered, exported, exported_float, epochs, tuple(warnings), allocation
    )
    return CompressedModel(run, network, network_report(run, network))


def plan(run: Run, formats: Sequence[OutputFormat]) -> Report:
    """Return the report of a dry run."""
    run, captured = capture_network(run)
    run = with_task(run, captured)
    prepared = prepare(captured, run.config)
    export_float(captured, run.example(), run.config.opset)
    for output_format in formats:
        output_format.check_network(prepared, run.example(), run.config)
    return planned_report(run, captured, prepared)


def _metadata(run: Run, captured: Captured) -> dict[str, str]:
    metadata = {metadata_keys.PREPROCESS: json.dumps(run.data.preprocess.to_dict(), sort_keys=True)}
    if not isinstance(run.task, Classification):
        metadata[metadata_keys.TASK] = run.task.name
    if run.source is not None:
        metadata[metadata_keys.SOURCE_SHA256] = run.source.sha256
        if run.source.data is not None and run.data.unseen(run.source.data) and "digest" in run.data.split:
            held_out = {"data": Path(run.data.spec).name, "digest": run.data.split["digest"]}
            metadata[metadata_keys.HELD_OUT] = json.dumps(held_out, sort_keys=True)
    if captured.dynamic:
        shapes = zip(captured.input_names, (list(x.shape[1:]) for x in run.example()), strict=True)
        metadata[metadata_keys.EXAMPLE] = json.dumps(dict(shapes), sort_keys=True)
    if run.data.classes is not None:
        metadata[metadata_keys.CLASSES] = json.dumps(list(run.data.classes), ensure_ascii=False)
    return metadata
