"""Which setups are modelled: the others are refused, never ignored."""
