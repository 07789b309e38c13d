"""What is alive when: states, the walk over the tape, each engine's buffers, the runtime's."""
