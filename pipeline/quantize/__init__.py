"""Quantisers: the weight rule and its deployable grid, activation calibration, the runtime's arithmetic."""
