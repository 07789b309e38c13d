"""How a model is trained, as pure data: setup, precision, optimizers, checkpointing, kernels."""
