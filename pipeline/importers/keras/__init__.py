"""Translation of a Keras model to a torch network: the same numbers, channels first, the same layer names.

It goes through the same stages as any torch network, so that a Keras model becomes the same integer graph.
Layers are told apart by the name of their class: neither the μL2Q layers nor torch are needed to write one.
"""
