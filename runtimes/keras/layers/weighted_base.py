"""What the weighted layers share: their three forms, their variables, how they are saved.

=========  ==================================================  =============================================
form       made by                                             variables
=========  ==================================================  =============================================
trainable  the constructor, `quantize_model`                   ``kernel``, ``bias``
stored     ``load_onnx(..., trainable=True)``                  the same, ``gain`` and the grid of the file
frozen     ``load_onnx``                                       ``codes`` (int8), ``bias``, grid and scales
=========  ==================================================  =============================================

A trainable layer takes α = λ*·σ and β = μ from its kernel at every step (equations 10 and 12 of [P], see
`ul2q.pipeline.quantize.ul2q`), or a fitted step that keeps its ratio to the kernel (see
`ul2q.pipeline.quantize.steps`), and moves both to the grid of the file: training drives weights to the edges
of their cells, where the smallest shift would change codes. A stored one keeps the grid of the file, because
the moments of quantised weights are not those of the weights that were quantised. The gradient passes to the
kernel unchanged (straight through), without a part through α and β. Both compute in float32. A frozen layer
computes with integers, exactly what ONNX Runtime computes with the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats import keras_layout as layout
from ul2q.pipeline.formats import packing
from ul2q.pipeline.graph.operators.definition import CodeFormat
from ul2q.pipeline.quantize import arithmetic, ul2q
from ul2q.pipeline.quantize.grid import Grid, snapped_levels
from ul2q.pipeline.quantize.option_values import GRANULARITIES
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.quantize.steps import Step
from ul2q.runtimes.keras import integers
from ul2q.runtimes.keras.integers import Tensor, as_format

PACKAGE = "ul2q"
_OPTIONS = ("initializer", "regularizer", "constraint")


class Weighted(keras.layers.Layer):
    """A layer with a kernel of k-bit codes. Data are channels last: [N, spatial..., C].

    Args:
        wbits: width of a weight, 1..8.
        abits: width of the activations around the layer: 8, or 32 for float.
        granularity: one (α, β) per "tensor" or per output "channel".
        step: rule for the step: "paper" for λ*σ; any other has its ratio in the variable ``ratio``.
        symmetric: whether such a step has β = 0 and the largest weight as its statistic.
        use_bias: whether there is a bias [C].
        activation: applied to the output of a layer that is not frozen; name or function.
        frozen: whether the weights are integer codes and the arithmetic is that of ONNX Runtime.
        stored: the grid of a file: ``multiplier``, ``zero_point``, ``channels`` (offsets per channel); frozen
            layers of 8-bit activations also have ``source``, ``out`` (scale, zero point) and ``parts``; those
            without ``out`` leave their result in float.
        onnx_name: name of the layer in the file it came from.
        options: ``kernel_`` and ``bias_`` with ``initializer``, ``regularizer``, ``constraint``, and the
            arguments of every Keras layer.

    Raises:
        UsageError: an argument is out of range.
    """

    kind: ClassVar[str] = "conv"
    per_channel_allowed: ClassVar[bool] = True

    def __init__(
        self,
        *,
        wbits: int = 2,
        abits: int = 8,
        granularity: str = "tensor",
        step: str = "paper",
        symmetric: bool = False,
        use_bias: bool = True,
        activation: Any = None,
        frozen: bool = False,
        stored: dict[str, Any] | None = None,
        onnx_name: str | None = None,
        **options: Any,
    ) -> None:
        held = {f"{name}_{option}": options.pop(f"{name}_{option}", None)
                for name in ("kernel", "bias") for option in _OPTIONS}  # fmt: skip
        super().__init__(autocast=False, **options)
        if wbits not in range(1, 9):
            raise UsageError(f"`wbits` is {wbits!r}: weights take 1 to 8 bits")
        if abits not in (8, 32):
            raise UsageError(f"`abits` is {abits!r}: use 8, or 32 for float activations")
        if granularity not in GRANULARITIES:
            raise UsageError(f"`granularity` is {granularity!r}: use one of {', '.join(GRANULARITIES)}")
        if frozen and stored is None:
            raise UsageError("a frozen layer needs the grid of a file: load it with load_onnx")
        self.wbits, self.abits, self.use_bias = int(wbits), int(abits), bool(use_bias)
        self.granularity = granularity if self.per_channel_allowed else "tensor"
        self.step, self.symmetric = str(step), bool(symmetric)
        self.activation = keras.activations.get(activation)
        self.frozen, self.onnx_name = bool(frozen), onnx_name
        self.fixed_grid, self.stored = stored is not None, dict(stored or {})
        self.options = _options(held)
        self.source = as_format(self.stored.get("source")) if frozen else None
        self.out = as_format(self.stored.get("out")) if frozen else None

    @property
    def integer(self) -> bool:
        """Whether the layer computes with integers."""
        return self.frozen and self.source is not None

    # What a layer of each kind says

    def kernel_shape(self, input_shape: Sequence[Any]) -> tuple[int, ...]:
        """Return the kernel's shape in Keras' order."""
        raise NotImplementedError

    def apply_kernel(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the linear map of ``x`` with a float32 ``kernel``."""
        raise NotImplementedError

    def split_input(self, x: Tensor, kernel: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the part of ``x`` and ``kernel`` that belongs to the input channels start..end."""
        return x[..., start:end], kernel[..., start:end, :]

    def outputs(self, shape: Sequence[int]) -> int:
        """Return the number of output channels for a kernel of ``shape``."""
        return int(shape[-1])

    # Variables

    def build(self, input_shape: Sequence[Any]) -> None:
        """Make the variables for inputs of ``input_shape``.

        Raises:
            UsageError: the number of channels is not known.
        """
        if input_shape[-1] is None:
            raise UsageError(f"{self.name}: the last dimension (channels) must be known, shape {input_shape}")
        shape = self.kernel_shape(input_shape)
        channels = self.outputs(shape)
        if self.frozen:
            self.codes = self._constant("codes", shape, "int8")
        else:
            self.kernel = self._trained("kernel", shape)
        if self.fixed_grid:
            self._build_grid(channels)
        elif self.step != "paper":
            self.ratio = self._constant("ratio", (channels,) if self.granularity == "channel" else ())
        if self.use_bias or self.integer:
            if self.frozen:
                self.bias = self._constant("bias", (channels,), "int32" if self.integer else "float32")
            else:
                self.bias = self._trained("bias", (channels,))
        else:
            self.bias = None
        self.built = True

    def _build_grid(self, channels: int) -> None:
        grid = (channels,) if self.stored["channels"] else ()
        self.alpha, self.beta = self._constant("alpha", grid), self._constant("beta", grid)
        self.offset = self._constant("offset", grid, "int32")
        self.scale = self._constant("scale", (channels,) if self.per_channel_allowed else (1,))
        if not self.frozen:
            self.grid_scale = self._constant("grid_scale", grid)
            self.gain = self.add_weight(
                name="gain", shape=self.scale.shape, dtype="float32", initializer="ones", autocast=False
            )
        if self.integer:
            self.factor = self._constant("factor", (channels,))
            self.in_scale = integers.scale_variable(self, "in_scale", self.source or CodeFormat(1.0, 0))
            if self.out is not None:
                self.out_scale = integers.scale_variable(self, "out_scale", self.out)

    def _constant(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        start = "ones" if dtype == "float32" else "zeros"
        return self.add_weight(
            name=name, shape=shape, dtype=dtype, initializer=start, trainable=False, autocast=False
        )

    def _trained(self, name: str, shape: tuple[int, ...]) -> Any:
        options = {option: self.options[f"{name}_{option}"] for option in _OPTIONS}
        return self.add_weight(name=name, shape=shape, dtype="float32", autocast=False, **options)

    # Computation

    def call(self, inputs: Tensor) -> Tensor:
        """Return the output [N, ..., C] for ``inputs`` [N, ..., I]."""
        x = ops.cast(inputs, "float32")
        if self.integer:
            return self._integer_output(x)
        if self.frozen:
            y = self.apply_kernel(x, self._integer_kernel() * self.scale_of_kernel(self.scale))
        else:
            y = self.apply_kernel(x, self.quantized_kernel())
            if self.fixed_grid:
                y = y * (ops.convert_to_tensor(self.scale) / self.grid_scale * self.gain)
        y = y if self.bias is None else y + self.bias
        return ops.cast(self.activation(y), self.compute_dtype)

    def scale_of_kernel(self, scale: Tensor) -> Tensor:
        """Return ``scale`` [C] so that it broadcasts with the kernel."""
        return ops.convert_to_tensor(scale)

    def quantized_kernel(self) -> Tensor:
        """Return the kernel at its levels, float32 in Keras' order; the gradient passes straight through."""
        kernel = ops.convert_to_tensor(self.kernel)
        w = layout.to_onnx(ops.stop_gradient(kernel), self.kind, ops)
        if not self.fixed_grid:
            axis = 0 if self.granularity == "channel" else None
            ratio = None if self.step == "paper" else ops.convert_to_tensor(self.ratio)
            alpha, beta = ul2q.scale_offset(
                w, self.wbits, axis, ops, ratio=ratio, symmetric=self.symmetric, check=False
            )
            alpha, beta = snapped_levels(alpha, beta, self.wbits, ops)
            levels = ul2q.levels(ul2q.codes(w, alpha, beta, self.wbits, 0, ops), alpha, beta, 0, ops)
        else:
            alpha, beta = ops.convert_to_tensor(self.alpha), ops.convert_to_tensor(self.beta)
            q = ul2q.codes(w, alpha, beta, self.wbits, 0, ops)
            offset = ul2q.along(ops.cast(self.offset, "float32"), len(w.shape), 0, ops)
            scale = ul2q.along(ops.convert_to_tensor(self.grid_scale), len(w.shape), 0, ops)
            levels = (q * float(self.stored["multiplier"]) + offset) * scale
        inputs = kernel.shape[-2] if self.kind == "depthwise" else None
        levels = layout.from_onnx(levels, self.kind, ops, inputs)
        # Exact in value, unlike w + stop_gradient(levels − w).
        return ops.stop_gradient(levels) + (kernel - ops.stop_gradient(kernel))

    def _integer_kernel(self) -> Tensor:
        """Return multiplier·q + offset as float32, in Keras' order."""
        q = ops.cast(self.codes, "float32") * float(self.stored["multiplier"])
        offset = ops.cast(self.offset, "float32")
        return q + (self.scale_of_kernel(offset) if self.stored["channels"] else offset)

    def _integer_output(self, x: Tensor) -> Tensor:
        v, kernel = integers.steps(x, self.in_scale), self._integer_kernel()
        total, start = ops.convert_to_tensor(self.bias), 0
        ends = self.stored.get("parts") or [0]
        for end in ends:
            part = (v, kernel) if len(ends) == 1 else self.split_input(v, kernel, start, end)
            total = integers.whole(self.apply_kernel(*part)) + total
            start = end
        factor = ops.convert_to_tensor(self.factor)
        if self.out is None:
            return ops.cast(total, "float32") * factor
        return integers.requantize(total, factor, self.out, self.out_scale)

    # Weights in and out

    def weight_codes(self) -> tuple[NDArray[np.int8], Grid]:
        """Return the codes in ONNX' order of axes, outputs first, and their deployable grid.

        Returns:
            Codes int8, and the grid on which α(q + 1/2) + β̂ are the weights of a file.
        """
        if not self.fixed_grid:
            return MuL2Q(self.step_rule()).quantize(self.onnx_kernel(), self.wbits, self.granularity, 0)
        alpha, beta = _numpy(self.alpha), _numpy(self.beta)
        scale = alpha / np.float32(self.stored["multiplier"])
        grid = Grid(
            k=self.wbits, alpha=alpha, beta=beta,
            scale=np.where(alpha > 0, scale, np.float32(1)) if self.frozen else _numpy(self.grid_scale),
            multiplier=int(self.stored["multiplier"]), offset=_numpy(self.offset),
            zero_point=int(self.stored["zero_point"]),
        )  # fmt: skip
        if self.frozen:
            return layout.to_onnx(_numpy(self.codes), self.kind, np), grid
        return ul2q.codes(self.onnx_kernel(), alpha, beta, self.wbits, 0, np).astype(np.int8), grid

    def step_rule(self) -> Step:
        """Return the rule for the step of a trainable kernel."""
        ratio = None if self.step == "paper" else _numpy(self.ratio)
        return Step(self.step, self.granularity, ratio, self.symmetric)

    def onnx_kernel(self) -> NDArray[np.float32]:
        """Return the float master kernel in ONNX' order of axes, outputs first."""
        kernel: NDArray[np.float32] = layout.to_onnx(_numpy(self.kernel), self.kind, np)
        return kernel

    def set_frozen(
        self, q: NDArray[np.int8], grid: Grid, scale: NDArray[np.float32], bias: NDArray[Any] | None
    ) -> None:
        """Take the integer weights of a file into a built layer that is frozen or stored.

        Args:
            q: codes in ONNX' order.
            grid: their grid.
            scale: float32 [C], real weight = scale·integer weight.
            bias: int32 [C], or float32 where the layer computes in float.
        """
        self.alpha.assign(grid.alpha)
        self.beta.assign(grid.beta)
        self.offset.assign(grid.offset)
        self.scale.assign(scale)
        inputs = self.kernel_inputs() if self.kind == "depthwise" else None
        if self.frozen:
            self.codes.assign(layout.from_onnx(q, self.kind, np, inputs))
        else:
            self.grid_scale.assign(grid.scale)
            levels = grid.multiplier * q.astype(np.float32)
            levels = levels + ul2q.along(grid.offset.astype(np.float32), q.ndim, 0, np)
            levels = levels * ul2q.along(grid.scale, q.ndim, 0, np)
            self.kernel.assign(layout.from_onnx(levels, self.kind, np, inputs))
        if self.bias is not None and bias is not None:
            self.bias.assign(bias)
        self._derive_factor()

    def kernel_inputs(self) -> int:
        """Return the input channels of the kernel."""
        return int((self.codes if self.frozen else self.kernel).shape[-2])

    def _derive_factor(self) -> None:
        # In NumPy and kept: in a backend's graph the division could become a product with a reciprocal.
        if self.frozen and self.source is not None:
            out_scale = 1.0 if self.out is None else self.out.scale
            self.factor.assign(arithmetic.multiplier(self.source.scale, _numpy(self.scale), out_scale))

    # Files

    def save_own_variables(self, store: Any) -> None:
        """Write the variables; those of a frozen layer with k bits a code."""
        if not self.frozen:
            super().save_own_variables(store)
            return
        for i, plane in enumerate(packing.pack(_numpy(self.codes), self.wbits)):
            store[f"codes{i}"] = plane
        floats, whole = [self.alpha, self.beta, self.scale], [self.offset]
        if self.bias is not None:
            (whole if self.integer else floats).append(self.bias)
        store["floats"] = np.concatenate([_numpy(v).reshape(-1) for v in floats])
        store["integers"] = np.concatenate([_numpy(v).reshape(-1) for v in whole])

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote.

        Raises:
            UsageError: the file holds something else.
        """
        if not self.frozen:
            super().load_own_variables(store)
            return
        try:
            planes = [np.asarray(store[f"codes{i}"]) for i in range(len(packing.PLANES[self.wbits]))]
            self.codes.assign(packing.unpack(planes, self.wbits, self.codes.shape))
            floats, whole = np.asarray(store["floats"]), np.asarray(store["integers"])
            for variable in (self.alpha, self.beta, self.scale):
                floats = _take(variable, floats)
            whole = _take(self.offset, whole)
            if self.bias is not None:
                _take(self.bias, whole if self.integer else floats)
        except (KeyError, ValueError, IndexError) as error:
            raise UsageError(
                f"{self.name}: the file does not hold its weights ({error}): write it again"
            ) from error
        self._derive_factor()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        serialize = {"initializer": keras.initializers.serialize, "regularizer": keras.regularizers.serialize,
                     "constraint": keras.constraints.serialize}  # fmt: skip
        held = {
            key: serialize[key.rpartition("_")[2]](value)
            for key, value in self.options.items()
            if value is not None and not self.frozen
        }
        linear = self.activation is keras.activations.linear
        return {
            **super().get_config(),
            "wbits": self.wbits,
            "abits": self.abits,
            "granularity": self.granularity,
            **({} if self.step == "paper" else {"step": self.step, "symmetric": self.symmetric}),
            "use_bias": self.use_bias,
            "activation": None if linear else keras.activations.serialize(self.activation),
            "frozen": self.frozen,
            "stored": self.stored if self.fixed_grid else None,
            "onnx_name": self.onnx_name,
            **held,
        }


def _options(held: dict[str, Any]) -> dict[str, Any]:
    get = {"initializer": keras.initializers.get, "regularizer": keras.regularizers.get,
           "constraint": keras.constraints.get}  # fmt: skip
    options = {key: get[key.rpartition("_")[2]](value) for key, value in held.items()}
    for name, default in (("kernel", "glorot_uniform"), ("bias", "zeros")):
        options[f"{name}_initializer"] = options[f"{name}_initializer"] or keras.initializers.get(default)
    return options


def _numpy(variable: Any) -> NDArray[Any]:
    return np.asarray(ops.convert_to_numpy(variable))


def _take(variable: Any, values: NDArray[Any]) -> NDArray[Any]:
    """Assign the first values to ``variable``.

    Returns:
        The rest.
    """
    size = int(np.prod(variable.shape))
    variable.assign(values[:size].reshape(variable.shape))
    return values[size:]
