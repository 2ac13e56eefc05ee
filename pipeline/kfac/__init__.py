"""K-FAC: natural gradient descent with Kronecker-factored curvature (Osawa et al. 2019).

``math`` and ``convolution`` are pure functions on tensors, ``layers`` says what is covered, ``hooks``
captures statistics, ``curvature`` holds factors and inverses, ``optimizer`` ties them together.
"""

from ul2q.pipeline.kfac.optimizer import KFAC

__all__ = ["KFAC"]
