"""torch.compile: what is compiled as one."""

from enum import Enum


class Compilation(Enum):
    """Which regions torch.compile is given, each a graph of its own."""

    NONE = "none"
    """Nothing: eager."""
    LAYER = "layer"
    """Each layer's forward pass on its own, as torchtitan, torchtune and diffusers'
    ``compile_repeated_blocks`` do; embedding, head and loss stay eager."""
    MODEL = "model"
    """The whole model with its loss (``model.compile()``, the Trainer's ``torch_compile``)."""

    __hash__ = object.__hash__
