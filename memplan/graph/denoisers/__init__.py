"""Diffusion transformers on the tape: a denoiser's forward pass on noised latents, and its loss."""
