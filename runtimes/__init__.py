"""Running finished models. Importing this package needs neither torch nor Keras."""

import os

# From 1.29 on, ONNX Runtime writes an identifier of the machine to the user's cache and sends events about
# sessions and models to its makers, unless this is set before it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
