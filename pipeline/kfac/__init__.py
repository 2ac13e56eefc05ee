"""K-FAC: natural gradient descent with Kronecker-factored curvature (Osawa et al. 2019).

In the order of a step: ``layers`` selects the covered layers and records their statistics with hooks,
``distributed`` reduces these to the ranks that own the layers, ``preconditioner`` stores factors and
inverses, refreshed by ``refresh_schedule``, and computes the natural gradient, ``momentum`` updates the
weights; ``optimizer`` combines them as a ``torch.optim.Optimizer``. ``math`` has pure functions on tensors.
Besides: ``options`` (settings), ``training_schemes`` and ``recipes`` (training schemes of the paper),
``fisher`` (factors of a trained model), ``state`` (their form in checkpoints).
"""

from ul2q.pipeline.kfac.distributed.sync_batch_norm import SyncBatchNorm
from ul2q.pipeline.kfac.distributed.sync_batch_norm import convert as convert_sync_batch_norm
from ul2q.pipeline.kfac.fisher import collect_factors
from ul2q.pipeline.kfac.optimizer import KFAC
from ul2q.pipeline.kfac.options import Options
from ul2q.pipeline.kfac.recipes import RECIPES, Recipe, recipe

__all__ = [
    "KFAC",
    "RECIPES",
    "Options",
    "Recipe",
    "SyncBatchNorm",
    "collect_factors",
    "convert_sync_batch_norm",
    "recipe",
]
