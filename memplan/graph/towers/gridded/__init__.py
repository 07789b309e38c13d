"""Pictures that stay grids on the tape: convolutions, windows, stages."""
