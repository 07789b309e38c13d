"""Runs block by block: recorded ones, predicted ones, and where they part."""
