"""Which memplan this is."""

__version__ = "0.1.0"
"""The top of ``CHANGELOG.md``; everything else reads it here."""
