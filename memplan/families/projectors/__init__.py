"""How each type joins its towers to its text model: perceptrons, mergers, queries.

A function declares the towers of one or more types of ``multimodal_types`` and what stands between
them and the text model (``modeling_*.py`` of each type, transformers 5.23).
"""
