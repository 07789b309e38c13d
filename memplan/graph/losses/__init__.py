"""From hidden states to a loss: of each task, and of jobs of several models."""
