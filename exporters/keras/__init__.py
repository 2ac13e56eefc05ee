"""Keras files, and ONNX files from Keras models."""
