"""A user's own module, written down by ``memplan.trace``, on the tape."""
