"""Models that are given pictures, clips of sound, series, or texts that are counted alone: what all of them are."""
