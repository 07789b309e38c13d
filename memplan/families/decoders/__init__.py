"""Decoders that have no class yet."""
