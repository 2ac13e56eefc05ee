"""Capture a network as a graph of layers, place quantisers in it, lower it to integer arithmetic."""
