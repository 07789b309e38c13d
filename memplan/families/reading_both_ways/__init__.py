"""Encoders that have no class yet, and stacks that read one."""
