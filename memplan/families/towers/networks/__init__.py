"""Towers that narrow a picture in stages, and networks of convolutions."""
