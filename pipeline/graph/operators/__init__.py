"""Integer operators: one definition each, and the registry from which every stage takes what it knows.

Nothing here imports torch: nodes of a captured graph are recognised by the names of their targets, layers by
the names of their classes, so that runtimes can use the definitions as well. Adding an operator takes its
definition in a module of this package, its ONNX form (`ul2q.exporters.onnx.operator_translations`) and its
Keras layer (`ul2q.runtimes.keras.layers.registry`).
"""
