"""Towers: encoders of images, video and sound that stand beside a language model.

Each module declares one kind's weights on a ``ParameterTable``; types share them.
"""
