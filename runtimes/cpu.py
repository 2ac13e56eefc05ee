"""What the CPU's 8-bit kernels do, found out by running one."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime as ort

_SIZE = 64  # several vector registers of products


@functools.cache
def kernels_saturate() -> bool:
    """Return whether products of uint8 and int8 are summed in saturating 16 bits.

    CPUs without VNNI do so; sums of two products of weights beyond ±64 can then be wrong. Asking the kernel
    itself is right under every CPU, emulator and build of ONNX Runtime.
    """
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.full((_SIZE, _SIZE), 127, np.int8), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["codes", "weight"], ["sums"])],
        "probe",
        [helper.make_tensor_value_info("codes", onnx.TensorProto.UINT8, [1, _SIZE])],
        [helper.make_tensor_value_info("sums", onnx.TensorProto.INT32, [1, _SIZE])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    live = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (sums,) = live.run(None, {"codes": np.full((1, _SIZE), 255, np.uint8)})
    return bool((sums != 255 * 127 * _SIZE).any())
