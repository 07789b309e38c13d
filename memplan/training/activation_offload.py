"""Where what is kept for the backward pass lies between the passes."""

from enum import Enum

from memplan.fast_dataclass import dataclass


class ActivationOffload(Enum):
    """Which tensors kept for the backward pass go to CPU RAM, and how."""

    NONE = "none"
    SAVE_ON_CPU = "save-on-cpu"
    """``torch.autograd.graph.save_on_cpu(pin_memory=True)`` around the model's call."""
    STREAMED = "streamed"
    """TRL's ``OffloadActivations`` (``activation_offloading=True``)."""
    BLOCKING = "blocking"
    """TRL's without a stream of its own (``use_streams=False``; axolotl's ``legacy``)."""
    TORCHTUNE = "torchtune"
    """torchtune's (``enable_activation_offloading``)."""
    CHECKPOINTS = "checkpoints"
    """Only the inputs of checkpointed layers, as Unsloth's checkpointing does it."""

    CHUNKS = "chunks"
    """A share of what each pass of a pipeline keeps, while others run (Megatron-Kwai)."""

    __hash__ = object.__hash__

    @property
    def sends(self) -> bool:
        """Whether anything goes."""
        return self is not ActivationOffload.NONE

    @property
    def hooks(self) -> bool:
        """Whether what goes is taken by hooks, tensor by tensor as it is kept."""
        return self not in (ActivationOffload.NONE, ActivationOffload.CHUNKS)


class WeightsKept(Enum):
    """Which weights that a product keeps stay where they are."""

    NONE = "none"
    AS_THEY_ARE = "as they are"
    """Those handed over as parameters; a transposed view of one is none."""
    ALL = "all"


class Rows(Enum):
    """What becomes of a tensor that does not lie in rows when it goes."""

    COPIED = "copied"
    """Into rows on the GPU, for as long as it takes to go."""
    COPIED_AND_HELD = "copied and held"
    """Into rows on the GPU, which wait in flight in its place."""
    AS_THEY_LIE = "as they lie"
    """It goes as it lies, unless there are gaps: then it is copied first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadRules:
    """How a way of offloading treats what autograd hands to it."""

    least_bytes: int = 0
    """What is smaller stays."""
    in_flight: int = 0
    """For how many of the tensors handed over after it one stays alive while it goes; 0: it is gone
    when the copy returns, and what comes back goes with the formula that reads it."""
    weights_kept: WeightsKept = WeightsKept.NONE
    rows: Rows = Rows.COPIED
    keeps_doubles: bool = False
    """What is handed over again while it is on its way stays."""
    keeps_output_layer: bool = False
    """The output layer's own stay."""
    keeps_loss: bool = False
    """So does what the loss keeps."""
    only_checkpoints: bool = False
    """Nothing goes but the inputs of layers that are computed again."""

    @property
    def holds_copies(self) -> bool:
        """A copy into rows waits in its tensor's place."""
        return self.rows is Rows.COPIED_AND_HELD


OFFLOAD_RULES: dict[ActivationOffload, OffloadRules] = {
    # torch 2.13, autograd/graph.py: a blocking copy of whatever is kept, weights with it.
    ActivationOffload.SAVE_ON_CPU: OffloadRules(),
    # TRL 1.16, models/activation_offloading.py
    ActivationOffload.STREAMED: OffloadRules(
        least_bytes=1024, in_flight=5, weights_kept=WeightsKept.ALL, rows=Rows.COPIED_AND_HELD,
        keeps_doubles=True, keeps_output_layer=True,
    ),
    ActivationOffload.BLOCKING: OffloadRules(
        least_bytes=1024, weights_kept=WeightsKept.ALL, keeps_output_layer=True
    ),
    # torchtune 0.6.1, training/_activation_offloading.py; its recipes compute the loss outside.
    ActivationOffload.TORCHTUNE: OffloadRules(
        least_bytes=1024, in_flight=5, weights_kept=WeightsKept.AS_THEY_ARE, rows=Rows.AS_THEY_LIE,
        keeps_output_layer=True, keeps_loss=True,
    ),
    ActivationOffload.CHECKPOINTS: OffloadRules(only_checkpoints=True),
}  # fmt: skip
