"""Language models that see: a text decoder's class, a tower's, and what leads from the one to the other."""
