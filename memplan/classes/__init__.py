"""Models as their classes: a file for each class family, and which types have one.

A type that has none is written down from its ``ModelSpec`` by ``memplan.graph``.
"""
