"""Environment of all tests and of the processes they start, set before a test module imports what reads it."""

import os

# Tests send nothing and write to no home folder.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# Their tensors are so small that threads would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
