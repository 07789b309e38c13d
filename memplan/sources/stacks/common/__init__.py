"""What the readers of all stacks share: the values of a file, words, and the setup made of them."""
