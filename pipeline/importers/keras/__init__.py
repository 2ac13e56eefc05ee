"""Make a torch network of a Keras model: the same numbers, channels first, layers under the same names.

It goes through the same stages as any torch network, so that a Keras model becomes the same integer graph.
Layers are told apart by the name of their class: neither the μL2Q layers nor torch are needed to write one.
"""

from ul2q.pipeline.importers.keras import unweighted_layers, weighted_layers
from ul2q.pipeline.importers.keras.translator import Ref, Translated, Translator, clean

__all__ = [
    "Ref",
    "Translated",
    "Translator",
    "clean",
    "unweighted_layers",
    "weighted_layers",
]
