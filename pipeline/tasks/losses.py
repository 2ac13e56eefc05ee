"""The default loss of fine-tuning, for any network: the float model is the teacher, labels are optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: (outputs, targets or None, outputs of the float model) -> scalar loss.
Loss = Callable[[Any, Any, Any], Tensor]


def default_loss(outputs: Any, targets: Any, teacher: Any) -> Tensor:
    """Return the divergence from the float model's distribution, plus the cross entropy with any labels.

    For outputs other than logits [N, classes] it is the mean squared difference from the float model's.

    Returns:
        A scalar.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        pairs = zip(_tensors(outputs), _tensors(teacher), strict=True)
        return torch.stack([F.mse_loss(a, b) for a, b in pairs]).sum()
    loss = F.kl_div(outputs.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")
    return loss if targets is None else loss + F.cross_entropy(outputs, targets)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
