"""Formats: layouts and packing of files, known to exporters and runtimes alike."""
