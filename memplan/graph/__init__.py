"""Models as operations on symbolic tensors: the tape, its operations, blocks and families."""
