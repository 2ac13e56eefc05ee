"""The arithmetic of the weight quantisers, one file each; `ul2q.pipeline.quantize.registry` lists them."""
