"""Walking the tape: what each operation leaves alive, forward and backward."""
