"""How a model comes onto the GPU."""
