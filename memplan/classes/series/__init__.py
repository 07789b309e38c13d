"""Models of time series."""
