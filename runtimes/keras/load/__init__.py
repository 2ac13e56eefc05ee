"""Conversion of an ONNX file written by ul2q to a Keras model."""
