"""The Keras mirror: quantised layers for Keras 3, files of `pipeline compress` as Keras models.

    from ul2q.runtimes.keras import load_onnx, quantize_model

    model = load_onnx("model.onnx")                    # the numbers of ONNX Runtime, bit for bit
    model = load_onnx("model.onnx", trainable=True)    # to fine-tune
    model = quantize_model(my_model, wbits=2)          # quantise one's own model, then fit

Needs Keras and one of its backends, not torch. Importing it registers the layers, so that
`keras.saving.load_model` reads their files.
"""

from ul2q.runtimes.keras.layers.activation_quantizer import EMAQuantizer
from ul2q.runtimes.keras.layers.data_movement import LowPadding, Part
from ul2q.runtimes.keras.layers.frozen import (
    UL2QActivation,
    UL2QAdd,
    UL2QAveragePooling2D,
    UL2QConcatenate,
    UL2QGlobalAveragePooling,
    UL2QMultiply,
)
from ul2q.runtimes.keras.layers.weighted import (
    UL2QConv1D,
    UL2QConv2D,
    UL2QConv2DTranspose,
    UL2QDense,
    UL2QDepthwiseConv2D,
)
from ul2q.runtimes.keras.layers.weighted_base import Weighted
from ul2q.runtimes.keras.load.load import load_onnx
from ul2q.runtimes.keras.quantize_model import calibrate, quantize_model

__all__ = [
    "EMAQuantizer",
    "LowPadding",
    "Part",
    "UL2QActivation",
    "UL2QAdd",
    "UL2QAveragePooling2D",
    "UL2QConcatenate",
    "UL2QConv1D",
    "UL2QConv2D",
    "UL2QConv2DTranspose",
    "UL2QDense",
    "UL2QDepthwiseConv2D",
    "UL2QGlobalAveragePooling",
    "UL2QMultiply",
    "Weighted",
    "calibrate",
    "load_onnx",
    "quantize_model",
]
