"""Megatron-core's layers on the tape: its own linear layers, its collectives, its global buffer."""
