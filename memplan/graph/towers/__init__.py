"""Towers for pictures, sound and texts beside or in place of a language model, on the tape."""
