"""Load a compressed model in Keras, bitwise equal to ONNX Runtime.

python examples/keras_load.py model.onnx model.keras
"""

import sys

import keras
import numpy as np

from ul2q.exporters.keras.save import save_keras
from ul2q.runtimes.keras import load_onnx

model = load_onnx(sys.argv[1])
model.summary()
print(f"{save_keras(model, sys.argv[2]):,} bytes")

again = keras.saving.load_model(sys.argv[2])
x = np.random.default_rng(0).random((4, *model.input_shape[1:])).astype(np.float32)
print("same outputs after loading:", np.array_equal(model.predict(x, verbose=0), again.predict(x, verbose=0)))
