"""What may be asked, and what is made of it: the table of options, and questions read from them.

The command line and ``memplan.api`` are two faces of it: an option is ``--batch-size`` in the one and
``batch_size`` in the other, with the same values, default and errors.
"""
