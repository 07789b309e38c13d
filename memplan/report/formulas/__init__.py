"""Published formulas beside memplan."""
