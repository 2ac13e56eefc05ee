"""Layers with curvature: hooks, statistics, factors and their inverses."""
