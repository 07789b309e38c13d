"""Decoders from before Llama: learned positions or slopes, networks without a gate."""
