"""Lessons on single operations: what each keeps for the backward pass, and why."""
