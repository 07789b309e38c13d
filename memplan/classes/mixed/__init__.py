"""Mixtures of experts: routers, experts, and the decoders that have them."""
