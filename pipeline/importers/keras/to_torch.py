"""Translate a Keras model to a torch network, layer by layer."""

from __future__ import annotations

import keras

from ul2q.pipeline.formats.keras_graph import functional, walk
from ul2q.pipeline.importers.keras import sequence_layers, unweighted_layers, weighted_layers
from ul2q.pipeline.importers.keras.translator import Ref, Translated, Translator

#: by the name of the Keras class
HANDLERS = {**unweighted_layers.HANDLERS, **weighted_layers.HANDLERS, **sequence_layers.HANDLERS}


def to_torch(model: keras.Model, *, drop_softmax: bool = False) -> Translated:
    """Return the float network of a Keras model in torch, channels first.

    Args:
        model: a functional or sequential model with channels_last data.
        drop_softmax: leave out a final softmax, which training losses expect to do themselves.

    Returns:
        The network.

    Raises:
        UsageError: the model is subclassed, not built, channels_first, or has a layer without an ONNX form.
    """
    network = functional(model)
    names = [str(t.name) for t in network.inputs]
    translator = Translator([tuple(t.shape) for t in network.inputs], names, HANDLERS)
    outputs: list[Ref] = walk(network, list(translator.refs), translator.visit)
    return translator.finish(translator.drop_softmax(outputs) if drop_softmax else outputs)
