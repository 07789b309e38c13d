"""Functions of training stacks on handles, many of them one kernel: what each keeps and takes, with its source."""
