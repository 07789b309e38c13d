"""Which kernels a training step runs, and what they are like."""
