"""What can be made as large as a card allows, and what stands in the place of its value."""

from enum import Enum

MAX = "max"
"""What is written where a value is looked for."""


class Quantity(Enum):
    """What is made as large as it can be, by the name of its value."""

    MICRO_BATCH = "micro_batch_size"
    SEQ_LEN = "seq_len"
    RANK = "rank"
    """Of the setup's LoRA."""
    LAYERS = "num_layers"
    """Of each of the model's stacks."""


OF_SETUP = frozenset({Quantity.MICRO_BATCH.value, Quantity.SEQ_LEN.value})
"""Those that are fields of ``TrainingSetup``."""
