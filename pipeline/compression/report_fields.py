"""Reports of a run: planned, computed but not written, and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ul2q.pipeline.compression.run_state import CompressedNetwork, Run
from ul2q.pipeline.evaluation import measure
from ul2q.pipeline.evaluation.fidelity import fidelity
from ul2q.pipeline.graph.capture import Captured
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.report import schema
from ul2q.pipeline.report.schema import Report
from ul2q.pipeline.version import __version__


def planned_report(run: Run, captured: Captured, prepared: Prepared) -> Report:
    """Return the report of a dry run: the layers that would be quantised, and what can be counted."""
    fields = {"layers": measure.planned_layers(prepared), **measure.counted(prepared)}
    return schema.complete({**_about(run), **fields, "seconds": {}, "warnings": captured.notes})


def network_report(run: Run, network: CompressedNetwork) -> Report:
    """Return the report of a compressed network before its files are written and measured."""
    fields = measure.layers_report(network.prepared, network.lowered, network.exported)
    fields["fidelity"] = fidelity(
        network.lowered.module, run.model, run.data, network.lowered.output_names, run.task.decisions
    )
    return written_report(run, network, {**fields, **measure.counted(network.prepared)})


def written_report(run: Run, network: CompressedNetwork, measured: Mapping[str, Any]) -> Report:
    """Return the report of a compressed network with the ``measured`` fields of `Report`."""
    seconds = {name: round(value, 3) for name, value in run.seconds.items()}
    return schema.complete({**_about(run), **measured, "seconds": seconds, "warnings": network.warnings})


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
