"""ONNX files: the lowered network with packed integer weights, and the float network."""
