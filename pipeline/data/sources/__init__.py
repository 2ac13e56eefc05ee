"""Data sources: one module each, listed in the registry.

The modules are imported by the command line for its help, so they import NumPy, torch and data packages only
while they read.
"""
