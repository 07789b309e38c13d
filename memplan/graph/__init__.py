"""Models as operations on symbolic tensors: the tape, operations, and blocks made of them."""
