"""Quantised Keras layers."""
