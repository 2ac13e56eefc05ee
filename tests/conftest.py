"""Set before any test module imports ONNX Runtime itself: tests send nothing and write to no home folder."""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
