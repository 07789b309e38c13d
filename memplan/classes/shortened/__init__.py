"""Encoders whose layers see fewer tokens than are given: pooled, read by latent vectors, or told apart by hashes."""
