"""Public trained networks, samples for them, and the static quantisation that they are compared with."""
