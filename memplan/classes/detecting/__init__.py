"""Detectors of objects, which are counted."""
