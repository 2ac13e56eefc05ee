"""Sessions, runs, errors, inner tensors, operators and measurements in ONNX Runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ul2q.pipeline.errors import JobError, UsageError
from ul2q.runtimes import onnxruntime as runtime

MakeModel = Callable[..., onnx.ModelProto]


def naive_codes(conv: onnx.ModelProto, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes before and after the convolution, one number at a time."""
    weight = next(numpy_helper.to_array(t) for t in conv.graph.initializer if t.name == "w").astype(int)
    xq = np.clip(np.rint(x / np.float32(0.02)) + 128, 0, 255).astype(int)
    multiplier = np.float32(np.float32(0.02) * np.float32(0.01)) / np.float32(0.05)
    yq = np.empty((len(x), 2, 4, 4), int)
    for n, channel, i, j in np.ndindex(*yq.shape):
        total = int(((xq[n, 0, i : i + 3, j : j + 3] - 128) * weight[channel, 0]).sum())
        yq[n, channel, i, j] = np.clip(np.rint(np.float32(total) * multiplier) + 128, 0, 255)
    return xq, yq


def test_outputs_gives_the_codes_inside_a_fused_model(conv: onnx.ModelProto) -> None:
    x = np.random.default_rng(2).standard_normal((5, 1, 6, 6)).astype(np.float32)
    before = conv.SerializeToString()
    got = runtime.outputs(conv, ["yq", "xq"], x, batch=2)
    xq, yq = naive_codes(conv, x)
    assert list(got) == ["yq", "xq"]
    np.testing.assert_array_equal(got["xq"], xq)
    np.testing.assert_array_equal(got["yq"], yq)
    assert conv.SerializeToString() == before
    np.testing.assert_array_equal(runtime.outputs(conv, ["logits", "yq"], x)["yq"], yq)
    with pytest.raises(UsageError, match=r"no tensors \['nowhere'\]"):
        runtime.outputs(conv, ["nowhere"], x)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 7, 100])
@pytest.mark.case("other-batch", outcome="works")
def test_run_is_the_same_for_every_batch_size(conv_path: Path, batch: int, low_memory: bool) -> None:
    x = np.random.default_rng(3).standard_normal((7, 1, 6, 6)).astype(np.float32)
    _, yq = naive_codes(onnx.load(conv_path), x)
    got = runtime.run(runtime.session(conv_path, low_memory=low_memory), x, batch)
    assert list(got) == ["logits"]
    np.testing.assert_array_equal(got["logits"], (yq - 128).astype(np.float32) * np.float32(0.05))


def test_float64_is_cast_and_a_mapping_is_taken(make_matmul: MakeModel) -> None:
    live = runtime.session(make_matmul().SerializeToString())
    np.testing.assert_array_equal(
        runtime.run(live, {"input": np.eye(3)})["logits"], [[0, 10], [1, 11], [2, 12]]
    )


def test_sessions_keep_threads(make_matmul: MakeModel) -> None:
    assert runtime.session(make_matmul(), threads=1).get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize("saturates", [False, True])
def test_the_exact_kernels_are_asked_for_where_the_fast_ones_saturate(
    make_matmul: MakeModel, monkeypatch: pytest.MonkeyPatch, saturates: bool
) -> None:
    monkeypatch.setattr(runtime, "kernels_saturate", lambda: saturates)
    options = runtime.session(make_matmul()).get_session_options()
    if saturates:
        assert options.get_session_config_entry("session.x64quantprecision") == "1"
    else:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            options.get_session_config_entry("session.x64quantprecision")


@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize("accurate", [False, True])
def test_plain_and_accurate_sessions_are_those_on_every_cpu(
    make_matmul: MakeModel, monkeypatch: pytest.MonkeyPatch, saturates: bool, accurate: bool
) -> None:
    monkeypatch.setattr(runtime, "kernels_saturate", lambda: saturates)
    options = runtime.session(make_matmul(), accurate=accurate).get_session_options()
    if accurate:
        assert options.get_session_config_entry(runtime.ACCURATE) == "1"
    else:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            options.get_session_config_entry(runtime.ACCURATE)


def test_operators_are_those_after_fusion(conv_path: Path, make_matmul: MakeModel) -> None:
    fused = runtime.operators(conv_path)
    fused.pop("Transpose", None)  # where the runtime's kernels want channels last
    assert fused == {"DequantizeLinear": 1, "QLinearConv": 1, "QuantizeLinear": 1}
    assert runtime.operators(make_matmul()) == {"MatMul": 1}


def test_metadata_is_read(conv_path: Path) -> None:
    assert runtime.metadata(conv_path) == {"ul2q.version": "0.0.0"}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 4), np.float32), r"shape \[2, 4\], the model takes \[N, 3\]"),
        (np.zeros(3, np.float32), r"shape \[3\], the model takes \[N, 3\]"),
        (np.zeros((0, 3), np.float32), "holds no samples"),
        (np.zeros((2, 3), np.uint8), "is uint8, the model takes float32"),
        ({"other": np.zeros((2, 3), np.float32)}, r"inputs \['input'\], given are \['other'\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(make_matmul: MakeModel, x: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runtime.run(runtime.session(make_matmul()), x)  # type: ignore[arg-type]


def test_a_fixed_batch_size_is_kept(make_matmul: MakeModel) -> None:
    live = runtime.session(make_matmul(batch=2))
    assert runtime.run(live, np.ones((4, 3)), batch=3)["logits"].shape == (4, 2)
    with pytest.raises(UsageError, match="exactly 2 samples at a time, given are 3"):
        runtime.run(live, np.ones((3, 3)))


def test_an_output_without_batch_is_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["input"], ["total"], keepdims=0)],
        "sum",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("total", TensorProto.FLOAT, [])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(JobError, match="'total' has shape"):
        runtime.run(runtime.session(model), np.ones((3, 3)))


def bad_file(folder: Path, kind: str, good: bytes) -> Path:
    path = folder / f"{kind}.onnx"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        content = {"empty": b"", "text": b"not a model\n" * 9, "truncated": good[: len(good) // 2]}
        path.write_bytes(content[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "does not exist"),
        ("directory", "is a directory"),
        ("empty", "is empty"),
        ("text", "is not an ONNX file"),
        ("truncated", "is not an ONNX file, or it is truncated"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, conv: onnx.ModelProto, kind: str, message: str) -> None:
    path = bad_file(tmp_path, kind, conv.SerializeToString())
    for use in (runtime.session, runtime.metadata, runtime.operators, runtime.peak_rss):
        with pytest.raises(UsageError, match=message) as error:
            use(path)
        assert path.name in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.case("moved-file", outcome="refused")
def test_missing_external_data_is_named(tmp_path: Path, make_matmul: MakeModel) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        make_matmul(rows=30, columns=30),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UsageError, match=r"weights\.bin"):
        runtime.session(path)
    with pytest.raises(UsageError, match=r"weights\.bin"):
        runtime.load_model(path)


@pytest.mark.case("newer-format", outcome="refused")
def test_a_file_of_a_newer_format_is_refused(conv: onnx.ModelProto) -> None:
    conv.ir_version = 99
    with pytest.raises(UsageError, match=r"cannot load the model: .*99"):
        runtime.session(conv)


def test_bench_compares_two_models(make_matmul: MakeModel) -> None:
    small, large = make_matmul(), make_matmul(rows=1000, columns=4000)
    result = runtime.bench(large, small, runs=20)
    assert result["ratio"] == result["median_ms"] / result["against_median_ms"]
    assert result["ratio"] > 2  # four million products against six
    assert result["p95_ms"] >= result["median_ms"] > 0
    assert (result["threads"], result["runs"], result["operators"]) == (1, 20, {"MatMul": 1})
    assert result["shares"] == {"MatMul": 1.0}
    assert runtime.bench(small, runs=40, enough_seconds=0)["runs"] == runtime.LEAST_RUNS
    alone = runtime.bench(small, runs=3)
    assert alone["against_median_ms"] is None
    assert alone["ratio"] is None
    with pytest.raises(UsageError, match="`runs` is 0"):
        runtime.bench(small, runs=0)


def test_bench_needs_an_input_for_open_shapes(conv: onnx.ModelProto) -> None:
    conv.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"
    with pytest.raises(UsageError, match=r"open shape \[N, 1, N, 6\]: give an input"):
        runtime.bench(conv)


def test_bench_in_a_process_of_its_own(tmp_path: Path, make_matmul: MakeModel) -> None:
    onnx.save(make_matmul(), tmp_path / "small.onnx")
    result = runtime.bench_apart(tmp_path / "small.onnx", tmp_path / "small.onnx", runs=3)
    assert (result["threads"], result["runs"], result["operators"]) == (1, 3, {"MatMul": 1})
    assert result["ratio"] == result["median_ms"] / result["against_median_ms"]
    with pytest.raises(UsageError, match="`runs` is 0"):
        runtime.bench_apart(tmp_path / "small.onnx", tmp_path / "small.onnx", runs=0)
    with pytest.raises(UsageError, match=r"none\.onnx"):
        runtime.bench_apart(tmp_path / "small.onnx", tmp_path / "none.onnx")


def test_load_times_of_two_files(tmp_path: Path, make_matmul: MakeModel) -> None:
    paths = [tmp_path / "small.onnx", tmp_path / "large.onnx"]
    onnx.save(make_matmul(), paths[0])
    onnx.save(make_matmul(rows=3000, columns=4000), paths[1])
    small, large = runtime.load_times(paths, runs=3)
    assert 0 < small < large  # six weights against twelve million
    with pytest.raises(UsageError, match=r"none\.onnx"):
        runtime.load_times([tmp_path / "none.onnx"])


def test_peak_rss_sees_the_weights_and_not_the_caller(tmp_path: Path, make_matmul: MakeModel) -> None:
    ballast = np.ones(200_000_000, np.uint8)  # resident in this process: must not count
    sizes = {}
    for name, rows in (("small", 1), ("large", 5000)):
        onnx.save(make_matmul(rows=rows, columns=2000), tmp_path / name)
        sizes[name] = runtime.peak_rss(tmp_path / name)
    assert sizes["small"] < 200_000_000 <= ballast.nbytes
    assert sizes["large"] - sizes["small"] > 0.9 * 4 * 5000 * 2000


def test_torch_is_not_imported() -> None:
    code = "import sys, ul2q.runtimes.onnxruntime; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_runtime_writes_nothing_to_the_users_cache(tmp_path: Path, conv_path: Path) -> None:
    code = "import sys; from ul2q.runtimes import onnxruntime as r; r.session(sys.argv[1])"
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"} | home
    command = [sys.executable, "-c", code, str(conv_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == [conv_path.name]
