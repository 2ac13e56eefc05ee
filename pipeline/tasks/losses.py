"""Losses of fine-tuning that suit any network: labels where there are some, the float network as teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: (outputs, targets or None, outputs of the float model) -> scalar loss.
Loss = Callable[[Any, Any, Any], Tensor]


def default_loss(outputs: Any, targets: Any, teacher: Any) -> Tensor:
    """Cross entropy with the labels, if any, plus the divergence from the teacher's distribution.

    Outputs that are not class scores [N, classes] are fitted to the teacher's in the mean square.

    Returns:
        A scalar.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        pairs = zip(_leaves(outputs), _leaves(teacher), strict=True)
        return torch.stack([F.mse_loss(a, b) for a, b in pairs]).sum()
    loss = F.kl_div(outputs.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")
    return loss if targets is None else loss + F.cross_entropy(outputs, targets)


def _leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
