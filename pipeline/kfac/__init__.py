"""K-FAC: natural gradient descent with Kronecker-factored curvature (Osawa et al. 2019).

``math``, ``patches``, ``rows``, ``lags`` and ``convolution`` are pure functions on tensors, ``layers`` and
``batch_norm`` say what is covered, ``hooks`` captures statistics (``sums``), ``owners``, ``transport``,
``exchange`` and ``collector`` bring them to the ranks that own the layers, ``curvature`` and ``natural`` hold
factors and inverses, ``schedule`` says when they are refreshed, ``optimizer`` ties everything together.
``schemes`` and ``recipes`` are the training schemes, ``sync_batch_norm`` normalises over all ranks,
``fisher`` collects the factors of a trained model, ``record`` is the form in which checkpoints keep them.
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
