"""Memory that others measured on GPUs and published, against what memplan says of the same runs."""
