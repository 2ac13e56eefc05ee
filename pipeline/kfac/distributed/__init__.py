"""Distributed K-FAC: ownership of layers and collectives on torch.distributed."""
