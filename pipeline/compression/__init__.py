"""Compression: the stages from a captured network to verified files."""
