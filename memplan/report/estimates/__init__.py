"""An estimate as people read it: the answer first, then setups side by side, or one account."""
