"""What stands in this machine: its cards and who has how much of them, its memory, disks and packages.

Nothing here starts a CUDA context, imports torch or writes anything.
"""
