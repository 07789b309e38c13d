"""What every stage's account starts from: the model's parameters, the engine's settings, sizes."""

from functools import lru_cache

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.options import DeepSpeedOptions, read_options
from memplan.memory.deepspeed.partition import (
    FlatBuffer,
    FlatPartition,
    ModelWeights,
    model_weights,
)
from memplan.memory.rank import RankInput
from memplan.training.choices import Offload, ZeroStage
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import Stepped, state_bytes
from memplan.training.optimizers.table import chosen
from memplan.training.splitting.context_parallel import ContextParallelKind

MASTER_BYTES = 4
"""Bytes of an element of the master weights, of each state and of the gradients of a step."""


class Sizes:
    """A model's parameters, as far as cutting them goes: equal ones are one object."""

    __slots__ = ("numels", "trainable")

    def __init__(self, numels: tuple[int, ...], trainable: tuple[bool, ...]) -> None:
        self.numels = numels
        """Elements of each parameter [elements]."""
        self.trainable = trainable


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank of a DeepSpeed run."""

    given: RankInput
    options: DeepSpeedOptions
    weights: ModelWeights
    sizes: Sizes
    rank: int
    num_ranks: int
    weight_bytes: int
    """Of an element of a weight."""
    gradient_bytes: int
    """Of an element of an accumulated gradient."""
    accumulates_apart: bool
    """Gradients accumulate in another dtype than the weights'."""
    communication_bytes: int
    """Of an element of a gradient on its way between the ranks."""
    capacity_bytes: int | None
    """Of the GPU; None: more than is needed."""

    @property
    def offloads_optimizer(self) -> bool:
        """Master weights and states are not on the GPU."""
        return self.given.setup.offload_optimizer is not Offload.NONE

    @property
    def swaps_optimizer(self) -> bool:
        """They are on NVMe between the steps."""
        return self.given.setup.offload_optimizer is Offload.NVME

    @property
    def offloads_param(self) -> bool:
        """Shards are not on the GPU."""
        return self.given.setup.offload_param is not Offload.NONE

    def swapped_share(self, num_elements: int) -> float:
        """Of so many elements of shards, the share that is on NVMe: beyond what stays in CPU RAM."""
        if self.given.setup.offload_param is not Offload.NVME or not num_elements:
            return 0.0
        return max(0, num_elements - self.options.param_max_in_cpu) / num_elements

    @property
    def is_replicated(self) -> bool:
        """Every rank holds all weights."""
        return self.given.setup.zero_stage is not ZeroStage.PARAMETERS

    @property
    def accumulates(self) -> bool:
        """More than one micro-step before the optimizer's."""
        return self.given.setup.gradient_accumulation_steps > 1

    def state_bytes(self, numel: int) -> int:
        """The optimizer's states of so many elements of fp32 masters [bytes]."""
        setup = self.given.setup
        row, options = chosen(setup.optimizer, setup.optimizer_options)
        return state_bytes(row, options, Stepped((numel,), DType.FP32))

    @property
    def master_bytes(self) -> int:
        """Of an element of the master weights, of each state and of the gradients of a step."""
        return DType.BF16.num_bytes if self.options.bf16_masters else MASTER_BYTES

    @property
    def master_name(self) -> str:
        """Their dtype, for people."""
        return DType.BF16.label if self.options.bf16_masters else DType.FP32.label

    @property
    def trained_bytes(self) -> int:
        """All trained parameters, as weights."""
        return self.weight_bytes * self.weights.num_trained

    @property
    def frozen_bytes(self) -> int:
        """All others; codes in their own format."""
        weights = self.weights
        plain = weights.num_frozen - weights.packed_numel
        return self.weight_bytes * plain + weights.packed_bytes

    @property
    def model_bytes(self) -> int:
        """The whole model, as it is loaded."""
        return self.trained_bytes + self.frozen_bytes

    @property
    def largest_bytes(self) -> int:
        """The largest trained parameter."""
        return rounded(self.weight_bytes * self.weights.largest_trained)

    def partition(self, *, round_robin: bool) -> FlatPartition:
        """How the flat buffer of stages 1 and 2 is cut, and which part is this rank's."""
        return remembered_partition(self.flat_buffer(round_robin=round_robin), self.rank)

    def flat_buffer(self, *, round_robin: bool) -> FlatBuffer:
        """How the flat buffer of stages 1 and 2 is cut."""
        return remembered_buffer(self.sizes, self.num_ranks, round_robin)

    @property
    def is_flat(self) -> bool:
        """Whether stage 0's wrapper is ``FP16_Optimizer`` (engine.py, ``_configure_fp16_optimizer``)."""
        own = self.given.setup.optimizer is Optimizer.ADAMW_FUSED and not self.options.torch_adam
        return own and self.given.formats.master_weights

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether stage 1, or a pipeline without ZeRO, runs with ``BF16_Optimizer`` (engine.py,
        ``_do_optimizer_sanity_check``)."""
        bf16 = self.given.formats.weights is DType.BF16
        if self.given.setup.zero_stage is ZeroStage.NONE:
            return bf16 and self.given.setup.pipeline is not None
        return bf16 and self.gradient_bytes == MASTER_BYTES and not self.offloads_optimizer


def prepare_job(given: RankInput, *, rank: int, capacity_bytes: int | None = None) -> Job:
    """Read the settings and write the parameters and the backward pass out."""
    setup, formats = given.setup, given.formats
    options = read_options(setup, hidden_size=hidden_size(given.tape))
    weights = model_weights(given.tape)
    accumulated = options.grad_accum_dtype or formats.gradients
    communicated = options.communication_data_type or formats.weights
    shared = setup.sequences_shared
    if shared is not None and shared.kind is ContextParallelKind.ALL_TO_ALL:
        # A ring is none of DeepSpeed's: to it each rank has data of its own.
        communicated = options.sequence_communication_dtype or DType.FP32
    return Job(
        given=given,
        options=options,
        weights=weights,
        sizes=_sizes(tuple(weights.numels), tuple(weights.trainable)),
        rank=rank,
        num_ranks=setup.gradient_ranks,
        weight_bytes=formats.weights.num_bytes,
        gradient_bytes=accumulated.num_bytes,
        accumulates_apart=accumulated is not formats.weights,
        communication_bytes=communicated.num_bytes,
        capacity_bytes=capacity_bytes,
    )


@lru_cache(maxsize=64)
def _sizes(numels: tuple[int, ...], trainable: tuple[bool, ...]) -> Sizes:
    return Sizes(numels, trainable)


@lru_cache(maxsize=64)
def remembered_buffer(sizes: Sizes, num_ranks: int, round_robin: bool) -> FlatBuffer:
    """The cut of one model's parameters; remembered, since it is the same for every batch."""
    return FlatBuffer(sizes, num_ranks=num_ranks, round_robin=round_robin)


@lru_cache(maxsize=64)
def remembered_partition(buffer: FlatBuffer, rank: int) -> FlatPartition:
    """One rank's part of it."""
    return FlatPartition(buffer, rank)


def hidden_size(tape: Tape) -> int:
    """The width of the residual stream: what a layer hands to the next, for each token."""
    tokens = tape.options.batch_size * tape.options.seq_len
    for segment in tape.segments:
        if segment.is_layer and segment.output is not None:
            return segment.output.numel // tokens
    first = tape.segments[0]
    return first.parameters[0].shape[-1] if first.parameters else 0


def rounded(num_bytes: int) -> int:
    """Up to the allocator's block [bytes]."""
    return -(-num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
