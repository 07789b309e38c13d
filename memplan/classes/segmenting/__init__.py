"""Segment Anything and its kin: pictures whose parts are masked, and the encoder that others see with."""
