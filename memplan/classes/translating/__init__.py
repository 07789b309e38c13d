"""Encoder-decoders: two stacks, of which the second one reads what the first one returns."""
