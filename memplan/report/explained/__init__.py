"""The arithmetic of an estimate."""
