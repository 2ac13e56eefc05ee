"""Build a model in Keras, train it with 2-bit weights, and write the integer graph in ONNX.

python examples/keras_quantize.py model.onnx
"""

import sys

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from ul2q.exporters.keras.to_onnx import to_onnx
from ul2q.runtimes.keras import load_onnx, quantize_model

keras.utils.set_random_seed(0)
data = load_digits()
x, y = (data.images[..., None] / 16).astype(np.float32), data.target
loss = "sparse_categorical_crossentropy"

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(x[:1400], y[:1400], epochs=15, verbose=0)
print(f"float: {model.evaluate(x[1400:], y[1400:], verbose=0)[1]:.4f}")

quantised = quantize_model(model, wbits=2)
quantised.compile("adam", loss, metrics=["accuracy"])
quantised.fit(x[:1400], y[:1400], epochs=15, verbose=0)
print(f"2 bits in training: {quantised.evaluate(x[1400:], y[1400:], verbose=0)[1]:.4f}")

to_onnx(quantised, sys.argv[1])
deployed = load_onnx(sys.argv[1]).predict(x[1400:], verbose=0)
print(f"2 bits in the file: {(deployed.argmax(1) == y[1400:]).mean():.4f}")
