"""Attention: from hidden states to weighted values, by every way that classes and kernels go."""
