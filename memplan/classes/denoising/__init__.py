"""Diffusion transformers as their classes (diffusers 0.42)."""
