#!/bin/sh
# Compress a float Keras model from the command line: sh examples/keras_export.sh my_model.keras DATA
set -e
pipeline compress "$1" --wbits 2 --abits 8 --data "$2" --to onnx,keras -o compressed
pipeline evaluate compressed/model.onnx --data "$2"
pipeline evaluate compressed/model.keras --data "$2"
