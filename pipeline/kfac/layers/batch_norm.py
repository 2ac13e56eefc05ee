"""Batch normalisation as a layer with curvature: one 2x2 block for γ and β of every channel.

Shapes: ``n`` examples, ``c`` channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.statistics import UnitSums


class _Saved(NamedTuple):
    """Tensors that torch saves for the gradient of a batch normalisation, protected from changes until then.

    Attributes:
        x: its input [n, c, *positions].
        mean: mean of the batch [c].
        rstd: 1 / sqrt(var + ε) of the batch [c].
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def of(cls, x: Tensor, node: Any) -> _Saved | None:
        """Return the tensors saved by ``node``; None unless it is torch's batch normalisation of ``x``.

        Args:
            x: input of a batch normalisation in training mode.
            node: autograd node of its output.
        """
        if node is None or node.name() not in ("NativeBatchNormBackward0", "CudnnBatchNormBackward0"):
            return None
        if node._saved_input.data_ptr() != x.data_ptr() or node._saved_input.shape != x.shape:
            return None
        return cls(x, node._saved_result1, node._saved_result2)

    def normalised(self, used: int) -> Tensor:
        """Return x̂ of the first ``used`` examples."""
        return linear_algebra.normalised(self.x[:used], 0.0, (self.mean, self.rstd.square().reciprocal()))


@dataclass(frozen=True, eq=False)
class BatchNormLayer:
    """An affine batch normalisation: one 2x2 block for γ and β of every channel.

    Attributes:
        name: name of the module in the model.
        module: the module.
        weight: γ [c].
        bias: β [c].
    """

    name: str
    module: nn.modules.batchnorm._BatchNorm
    weight: nn.Parameter
    bias: nn.Parameter
    kind: str = "batchnorm"

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """γ and β."""
        return self.weight, self.bias

    def channels(self, output: Tensor) -> int:
        """Return the size of the channel dimension of an output."""
        return output.shape[1]

    def inputs(self, x: Tensor, used: int, *, rows: bool, node: Any = None) -> Tensor | _Saved:  # noqa: ARG002
        """Return x̂ of the batch, or the saved tensors from which to compute it later.

        Args:
            x: input of the layer [n, c, *positions].
            used: number of leading examples to return; all of them are normalised together.
            rows: ignored.
            node: autograd node of the layer's output.

        Returns:
            x̂ of the first ``used`` examples, or the saved tensors.
        """
        module = self.module
        if not (module.training or module.running_mean is None or module.running_var is None):
            return linear_algebra.normalised(x[:used], module.eps, (module.running_mean, module.running_var))
        if (saved := _Saved.of(x, node)) is not None:
            return saved
        statistics = getattr(module, "batch_statistics", None)  # of a normalisation across ranks
        return linear_algebra.normalised(x, module.eps, statistics)[:used]

    def input_error(self, x: Tensor, used: int) -> float:  # noqa: ARG002
        """Return 0: x̂ itself is exact."""
        return 0.0

    def sums(self, inputs: Tensor | _Saved, g: Tensor, *, rows: bool) -> UnitSums:  # noqa: ARG002
        """Return the statistics of a call, once its output gradient is known.

        Args:
            inputs: result of :meth:`inputs` for the same call.
            g: gradient of the loss with respect to the output, for the used examples.
            rows: ignored.

        Returns:
            The unnormalised statistics.
        """
        x_hat = inputs.normalised(len(g)) if isinstance(inputs, _Saved) else inputs
        return UnitSums(linear_algebra.unit_moment_(x_hat, g))

    def joined(self) -> Tensor:
        """Return an empty matrix for γ and β [c, 2]."""
        dtype = linear_algebra.full_type(self.weight.dtype)
        return self.weight.new_empty(len(self.weight), 2, dtype=dtype)

    def split(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Return the two columns."""
        return matrix[:, 0], matrix[:, 1]
