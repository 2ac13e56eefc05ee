"""Reports of a run: planned, computed but not written, and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ul2q.pipeline.compression.run_state import CompressedNetwork, Run
from ul2q.pipeline.evaluation import measure
from ul2q.pipeline.evaluation.fidelity import fidelity
from ul2q.pipeline.graph.capture import Captured
from ul2q.pipeline.graph.modes import in_eval_mode
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.report import schema
from ul2q.pipeline.report.schema import Report
from ul2q.pipeline.version import __version__
from ul2q.runtimes.memory import return_freed_memory

#: what a figure on test samples says that were split off after the training
PERHAPS_SEEN = "held out of fine-tuning; the network may have been trained on them"

_LARGEST_WIDTHS = "a dry run chooses no widths: its figures are those of the largest"


def planned_report(run: Run, captured: Captured, prepared: Prepared) -> Report:
    """Return the report of a dry run: the layers that would be quantised, and what can be counted."""
    fields = {"layers": measure.planned_layers(prepared), **measure.counted(prepared)}
    notes = [*captured.notes, *([_LARGEST_WIDTHS] if run.config.chooses_widths else [])]
    return schema.complete({**_about(run), **fields, "seconds": {}, "warnings": notes})


def network_report(run: Run, network: CompressedNetwork) -> Report:
    """Return the report of a compressed network before its files are written and measured."""
    fields = measure.layers_report(network.prepared, network.lowered, network.exported)
    with run.stage("evaluate"):
        fields |= accuracy_fields(run, network)
    fields["fidelity"] = fidelity(
        network.lowered.module, run.model, run.data, network.lowered.output_names, run.task.decisions
    )
    return written_report(run, network, {**fields, **measure.counted(network.prepared)})


def accuracy_fields(run: Run, network: CompressedNetwork) -> dict[str, Any]:
    """Return the fields ``accuracy`` and ``metrics``; neither without labelled test samples."""
    with in_eval_mode(run.model):
        before = test_scores(run, run.model)
    after = test_scores(run, network.lowered.module)
    if run.data.test is None or before is None or after is None:
        return {}
    name, recorded = run.metric_name, None if run.source is None else run.source.data
    return {
        "accuracy": {
            "metric": name,
            "samples": len(run.data.test),
            "float": before[name],
            "quantized": after[name],
            "note": None if run.data.unseen(recorded) else PERHAPS_SEEN,
        },
        "metrics": {
            other: {"float": value, "quantized": after.get(other)}
            for other, value in before.items()
            if other != name
        },
    }


def test_scores(run: Run, module: nn.Module) -> dict[str, float] | None:
    """Return the metrics on the test samples, or None without labelled ones."""
    metrics = run.test_metrics(module)
    return_freed_memory()
    return metrics


def written_report(run: Run, network: CompressedNetwork, measured: Mapping[str, Any]) -> Report:
    """Return the report of a compressed network with the ``measured`` fields of `Report`."""
    seconds = {name: round(value, 3) for name, value in run.seconds.items()}
    epochs = [dataclasses.asdict(epoch) for epoch in network.epochs]
    allocation = None if network.allocation is None else network.allocation.to_dict()
    about = {
        **_about(run),
        "allocation": allocation,
        "epochs": epochs,
        "seconds": seconds,
        "warnings": network.warnings,
    }
    return schema.complete({**about, **measured})


def _about(run: Run) -> dict[str, Any]:
    source = run.source
    return {
        "ul2q": __version__,
        "model": {
            "source": source.path.name if source else None,
            "sha256": source.sha256 if source else None,
            "arch": source.arch if source else type(run.model).__name__,
            "parameters": sum(p.numel() for p in run.model.parameters()),
        },
        "data": Path(run.data.spec).name,
        "task": {"name": run.task.name, "description": run.about_task or None},
        "config": run.config.to_dict(),
        "seed": run.config.seed,
    }
