"""Decoders whose tokens are mixed by states, short convolutions or linear attention."""
