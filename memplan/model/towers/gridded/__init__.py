"""Pictures that stay grids, as data: convolutions, windows, stages."""
