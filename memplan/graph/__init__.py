"""Models as operations on symbolic tensors: the tape, its operations and the blocks made of them."""
