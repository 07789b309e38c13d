"""Formulas that others published, as they published them: to compare with, never to estimate from."""
