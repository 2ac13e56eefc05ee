"""Readers of models that are neither checkpoints nor Keras files."""
