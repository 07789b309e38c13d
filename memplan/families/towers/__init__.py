"""What configs of towers have in common: sizes as they write them, nonlinearities by name."""
