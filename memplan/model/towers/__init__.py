"""What the modules of a tower compute, as data: the operations beside a block's declared weights.

A ``ParameterBlock`` says which weights stand somewhere in a model; its ``body``, one of the dataclasses
here, says what is made of them, so that ``memplan.graph.towers`` can write it down. A block without a
body is counted only. Names of modules are those that the block declares.

The blocks of a tower follow one another: what one gives, the next reads. A body that begins with
something of the batch (pictures, token ids) reads nothing; one that joins towers names them.
"""
