"""Turns what a user names or writes into objects: models, GPUs, files."""
