"""The Keras layers that stand for each ONNX operator; `HANDLERS` lists them by operator.

Images are [N, H, W, C] where the file has [N, C, H, W], sequences [N, L, C] where it has [N, C, L].
"""

from ul2q.runtimes.keras.load.operators import combining, moving, weighted
from ul2q.runtimes.keras.load.operators.registry import HANDLERS, Value

__all__ = ["HANDLERS", "Value", "combining", "moving", "weighted"]
