"""Evaluation: agreement of files and networks, accuracy, cost, memory and latency."""
