"""Write docs/inputs.md: every kind of difficult input, what becomes of it, and the tests that hold it.

A test says which kinds it holds by ``@pytest.mark.case("kind", ..., outcome="works")``, on itself or on one
of its parameters. This script reads the marks from the source of the tests without running them; ``--check``
only compares with the committed page.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "inputs.md"

OUTCOMES = {
    "works": "works",
    "trusted": "works with `--trust-pickle`",
    "warned": "works, with a warning",
    "float": "runs in float, with the reason",
    "refused": "refused in one line",
}

KINDS: dict[str, dict[str, str]] = {
    "Checkpoints": {
        "parallel-prefix": "State dict of DataParallel or DistributedDataParallel (`module.` first)",
        "compile-prefix": "State dict of a compiled network (`_orig_mod.` first), alone or with `module.`",
        "pickled-parallel": "The pickled DataParallel object itself",
        "pickled-module": "A pickled network whose class can be imported",
        "pickled-module-without-class": "A pickled network whose class is missing",
        "nested-state": "State dict within `state_dict`, `model`, `ema` …, beside the optimiser's state",
        "averaged-weights": "An average over the training (EMA) beside the last weights",
        "unwanted-weights": "Weights beside those of the network: losses, metrics (`--ignore`)",
        "tied-checkpoint": "A tied tensor saved under one of its names",
        "untied-checkpoint": "Different tensors for two names that the network ties",
        "quantised-source": "Networks, state dicts and files that are quantised already",
        "meta-weights": "Weights on the meta device",
        "wrong-keys": "Keys missing, unexpected, or of another shape",
        "half-weights": "Weights in float16 or bfloat16",
        "double-weights": "Weights in float64",
        "weights-not-finite": "Weights with NaN or infinity",
        "frozen-weights": "Weights that need no gradient",
        "empty-file": "An empty file",
        "truncated-file": "A truncated or altered file",
        "text-file": "A text file, a web page, any bytes",
        "other-zip": "A zip archive that is no checkpoint",
        "folder-as-file": "A folder in place of a file",
        "no-permission": "A file that may not be read",
        "odd-file-name": "A file name with spaces or letters beyond ASCII",
        "safetensors": "safetensors",
        "own-checkpoint": "A checkpoint of `pipeline train`",
        "torchscript": "TorchScript",
        "pt2": "A `.pt2` file of torch.export",
        "onnx-input": "A float ONNX file as the model",
        "unknown-onnx-operator": "An ONNX operator that is not read",
        "channels-last-onnx": "ONNX files of channels-last models, with transposes around every operator",
    },
    "Graphs: activations and wiring": {
        "inplace-relu": "In-place ReLU",
        "shared-relu": "One ReLU module called many times",
        "functional-relu": "`F.relu` and `torch.relu`",
        "relu6": "ReLU6 and other clamps",
        "hardswish": "Hardswish",
        "silu": "SiLU",
        "gelu": "GELU",
        "leaky-relu": "Leaky ReLU",
        "prelu": "PReLU",
        "sigmoid": "Sigmoid",
        "reused-layer": "One layer or block called twice",
        "tied-weights": "Weights tied between two layers",
        "tied-embedding": "An embedding tied with the output layer",
        "tied-transposed": "Weights tied with their transpose, or of a convolution and a transposed one",
        "shared-concat": "One concatenation read by two convolutions",
    },
    "Graphs: convolutions": {
        "conv-bias": "Convolution with and without bias",
        "groups": "Grouped convolution",
        "depthwise": "Depthwise convolution",
        "dilation": "Dilated convolution",
        "stride": "Stride that differs from the kernel",
        "uneven-padding": "Padding that differs between height and width",
        "padding-same": "padding='same'",
        "padding-mode": "Reflect padding and its kin",
        "conv1d": "One-dimensional convolution",
        "conv3d": "Three-dimensional convolution",
        "transposed-conv1d": "One-dimensional transposed convolution",
        "transposed-conv2d": "Two-dimensional transposed convolution, also before a batch norm",
    },
    "Graphs: batch norm": {
        "bn-without-affine": "Batch norm with affine=False",
        "bn-negative-gamma": "Negative γ",
        "bn-zero-gamma": "γ of 0 or 1e-12",
        "bn-small-variance": "Running variance near 0",
        "bn-before-conv": "Batch norm before the convolution",
        "bn-after-linear": "Batch norm after a linear layer",
        "bn-alone": "Batch norm without a convolution",
    },
    "Graphs: joins and moves": {
        "add-different-ranges": "Sum of tensors with very different ranges",
        "add-itself": "Sum of a tensor and itself",
        "concat-one": "Concatenation of one tensor",
        "concat-different-ranges": "Concatenation of tensors with different ranges",
        "gate": "Product with a gate (squeeze and excitation)",
        "mean-positions": "Mean over positions",
        "flatten-view": "flatten and view",
        "permute": "permute",
        "split-chunk": "split and chunk",
        "pixel-shuffle": "Pixel shuffle",
    },
    "Graphs: layers that stay in float": {
        "layer-norm": "LayerNorm",
        "group-norm": "GroupNorm",
        "softmax": "Softmax",
        "attention": "Attention, `nn.MultiheadAttention` too",
        "embedding": "Embedding",
        "lstm-gru": "LSTM and GRU",
        "keras-sequences": "Keras models of tokens and sequences: Embedding, LSTM, GRU, Bidirectional",
        "keras-shared-layers": "Keras layers that are called twice, and embeddings used again",
    },
    "Graphs: inputs, outputs, shapes": {
        "two-inputs": "Two inputs",
        "integer-mask": "An attention mask, or any input, of whole numbers",
        "own-scaling": "A Keras model that scales its images itself",
        "byte-images": "A network that takes bytes and scales them itself",
        "several-outputs": "Several outputs",
        "dict-output": "Outputs in a dict",
        "output-read-on": "An output that further layers read",
        "unused-layer": "A layer that is never called",
        "constant-branch": "A branch that does not depend on the input",
        "other-batch": "Captured with one batch size, run with another",
        "other-size": "An input of another size than captured",
        "other-length": "A text or signal of another length than captured",
        "size-fixed": "An axis that is to stay open, and that the network fixes",
        "half-input": "float16 samples",
        "data-dependent": "Control flow that depends on values",
    },
    "Values of weights": {
        "zero-tensor": "A tensor of zeros",
        "constant-tensor": "A constant tensor",
        "one-element": "A tensor of one element",
        "pruned-weights": "Pruned weights: many are exactly 0",
        "dead-channel": "A dead output channel",
        "outlier": "One weight 1,000 times the rest",
        "tiny-weights": "Tiny weights under a normal bias",
        "weights-far-from-zero": "Weights whose mean is far from zero",
    },
    "Values of activations": {
        "constant-activation": "Constant activations",
        "zero-activation": "Activations that are all zero",
        "negative-activation": "Activations that are all negative",
        "skewed-activation": "Hugely skewed activations",
        "activation-not-finite": "NaN or infinity for one sample",
    },
    "Calibration data": {
        "one-sample": "One sample",
        "less-than-a-batch": "Fewer samples than a batch",
        "partial-batch": "A last partial batch",
        "wrong-shape": "Samples of another shape",
        "wrong-dtype": "Samples of another type",
        "channel-order": "Channels last where the network takes them first",
        "bytes-against-floats": "Bytes 0..255 where the network takes 0..1",
        "labels-outside": "Labels outside the classes",
        "unreadable-image": "An unreadable image among good ones",
        "generator": "A generator of unknown length",
        "validation-without-test": "Samples for validation, and none for test",
        "parts-at-places": "Training, validation and test samples at places of their own",
        "swapped-layout": "Channels-first samples for a channels-last model",
        "undivided-source": "Data without a test part, which the network may have been trained on",
        "unstated-statistics": "Images for a network whose mean and standard deviation nothing states",
        "many-samples": "50,000 samples in constant memory",
    },
    "Targets": {
        "regression": "Numbers [N] or [N, D], or images, as targets",
        "multilabel": "Targets [N, labels] of 0 and 1",
        "token-labels": "A label for every token or pixel",
        "several-targets": "A target for each of several outputs (detectors)",
        "no-targets": "No targets: outputs of any meaning, and figures of how far they are from float",
        "one-hot": "One-hot rows",
        "unusable-targets": "Targets that differ in number or shape, are not numbers, or not finite",
    },
    "Files and runtimes": {
        "large-model": "A model above 2 GB",
        "moved-file": "A file moved away from the data file that belongs to it",
        "output-missing": "An output whose folder is missing",
        "output-read-only": "An output that cannot be written",
        "disk-full": "A full disk",
        "two-runs": "Two runs at once into one folder",
        "older-runtime": "An older runtime, an older opset",
        "newer-format": "A format newer than the installed runtime",
        "larger": "A file that is larger than the float one",
        "slower": "A file that is slower than the float one",
        "repeated-run": "A run that is repeated from its config.json alone",
        "same-seed": "Two runs with one seed: the same bytes",
        "interrupted": "An interrupt: the old output stays whole",
        "killed": "A run killed at any moment: the old output stays whole, the next run works",
        "resume": "A run that goes on where it was interrupted: the same bytes",
        "malformed-file": "Random, cut, altered and absurd files in every format that is read",
    },
}  # fmt: skip

HEAD = """# Inputs that break tools like this one

Kinds of networks, files and values that are often reported as failing somewhere in the field, what becomes of
each here, and the tests that hold it. `make docs` writes this page from the marks on the tests; a test
compares.
"""


def _marks(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield kind and outcome of every ``pytest.mark.case(...)`` within ``node``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.case":
            outcome = next(keyword.value for keyword in call.keywords if keyword.arg == "outcome")
            for kind in call.args:
                yield ast.literal_eval(kind), ast.literal_eval(outcome)


def marks_of(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield kind, outcome and the name of the test for every mark in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for kind, outcome in (mark for one in node.decorator_list for mark in _marks(one)):
                yield kind, outcome, node.name


def collect(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the links to the tests by kind and outcome.

    Raises:
        SystemExit: a mark names an unknown kind or outcome.
    """
    known = {kind for kinds in KINDS.values() for kind in kinds}
    links: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.rglob("test_*.py")):
        for kind, outcome, name in marks_of(path):
            where = f"{path.relative_to(folder)}::{name}"
            if kind not in known or outcome not in OUTCOMES:
                sys.exit(f"{where}: no kind {kind!r} with outcome {outcome!r} in tests/inputs_table.py")
            link = f"[{name.removeprefix('test_')}](../tests/{path.relative_to(folder).as_posix()})"
            if link not in links[kind][outcome]:
                links[kind][outcome].append(link)
    return links


def page(links: dict[str, dict[str, list[str]]]) -> str:
    """Return the text of docs/inputs.md."""
    lines = [HEAD]
    for title, kinds in KINDS.items():
        lines += [f"## {title}\n", "| input | what becomes of it | tests |", "|:--|:--|:--|"]
        for kind, text in kinds.items():
            rows = [(OUTCOMES[o], ", ".join(links[kind][o])) for o in OUTCOMES if links[kind][o]]
            lines += [f"| {text} | {outcome} | {tests} |" for outcome, tests in rows]
        lines.append("")
    return "\n".join(lines)


def missing(links: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the kinds that no test holds."""
    return [kind for kinds in KINDS.values() for kind in kinds if not any(links[kind].values())]


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it."""
    links = collect(ROOT / "tests")
    text = page(links)
    if "--check" in arguments:
        faults = [f"no test holds {kind!r}" for kind in missing(links)]
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            faults.append("docs/inputs.md is not what the tests say: run make docs")
        print(*faults, sep="\n")
        return bool(faults)
    PAGE.write_text(text, encoding="utf-8")
    print(f"written: {PAGE}; without a test: {', '.join(missing(links)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
