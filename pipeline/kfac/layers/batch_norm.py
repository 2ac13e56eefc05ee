"""Batch normalisation as a layer with curvature: one 2x2 block for γ and β of every channel.

Shapes: ``n`` examples, ``c`` channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.statistics import UnitSums


class _Kept(NamedTuple):
    """What torch keeps of a batch normalisation for its gradient, and will not let change until then.

    Attributes:
        x: its input [n, c, *positions].
        mean: mean of the batch [c].
        rstd: 1 / sqrt(var + ε) of the batch [c].
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def of(cls, x: Tensor, node: Any) -> _Kept | None:
        """Return what ``node`` keeps, None where it is not torch's batch normalisation of just ``x``.

        Args:
            x: input of a batch normalisation in training mode.
            node: what will compute the gradient of its output.
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

    def inputs(self, x: Tensor, used: int, *, rows: bool, node: Any = None) -> Tensor | _Kept:  # noqa: ARG002
        """x̂ of the batch, or what it can be formed from once it is needed.

        Args:
            x: input of the layer [n, c, *positions].
            used: number of examples, the first ones, to return; all of them are normalised together.
            rows: without meaning here.
            node: what will compute the gradient of the layer's output.

        Returns:
            x̂ of the first ``used`` examples, or what torch keeps anyway.
        """
        module = self.module
        if not (module.training or module.running_mean is None or module.running_var is None):
            return linear_algebra.normalised(x[:used], module.eps, (module.running_mean, module.running_var))
        if (saved := _Kept.of(x, node)) is not None:
            return saved
        statistics = getattr(module, "batch_statistics", None)  # of a normalisation across ranks
        return linear_algebra.normalised(x, module.eps, statistics)[:used]

    def input_error(self, x: Tensor, used: int) -> float:  # noqa: ARG002
        """Return 0: x̂ itself is exact."""
        return 0.0

    def sums(self, inputs: Tensor | _Kept, g: Tensor, *, rows: bool) -> UnitSums:  # noqa: ARG002
        """Statistics once the output gradient is known.

        Args:
            inputs: what :meth:`inputs` gave for the same call.
            g: gradient of the loss with respect to the output, of the examples used.
            rows: without meaning here.

        Returns:
            The unnormalised statistics of this call.
        """
        x_hat = inputs.normalised(len(g)) if isinstance(inputs, _Kept) else inputs
        return UnitSums(linear_algebra.unit_moment_(x_hat, g))

    def joined(self) -> Tensor:
        """Return an empty matrix for γ and β [c, 2]."""
        return self.weight.new_empty(len(self.weight), 2)

    def split(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Return the two columns."""
        return matrix[:, 0], matrix[:, 1]
