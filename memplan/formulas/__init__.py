"""Formulas that others published, as they published them: to compare with, never to estimate from."""

from memplan.formulas.article import activations_memory, gpu_memory_required

__all__ = ["activations_memory", "gpu_memory_required"]
