"""The Keras layers that stand for each ONNX operator.

Images are [N, H, W, C] where the file has [N, C, H, W], sequences [N, L, C] where it has [N, C, L].
"""

from ul2q.runtimes.keras.load.conversion import Handler
from ul2q.runtimes.keras.load.operators import data_movement, functions, integer, pooling, weighted

#: by ONNX operator
HANDLERS: dict[str, Handler] = {
    **weighted.HANDLERS,
    **data_movement.HANDLERS,
    **pooling.HANDLERS,
    **functions.HANDLERS,
    **integer.HANDLERS,
}

__all__ = ["HANDLERS"]
