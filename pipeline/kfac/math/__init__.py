"""Mathematics of Kronecker-factored curvature, as pure functions on tensors."""
