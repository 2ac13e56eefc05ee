"""The commands, each a function with its options; heavy imports happen inside them."""
