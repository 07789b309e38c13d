"""Mixtures of experts: routers, experts, and the loss that balances them."""
