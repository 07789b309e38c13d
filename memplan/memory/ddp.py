"""torch's DistributedDataParallel: whole parameters on every rank, gradients reduced in buckets.

Sources (torch 2.13): torch/csrc/distributed/c10d/reducer.cpp (``initialize_buckets``: a tensor for each
bucket, made at construction and kept; ``mark_variable_ready_dense``: a gradient is copied into its
bucket, and with ``gradient_as_bucket_view`` replaced by a view of it; ``autograd_hook`` does nothing
under ``no_sync``); torch/nn/parallel/distributed.py; ddp_comm_hooks/default_hooks.py.
"""

from collections.abc import Iterator
from enum import Enum

from memplan.dtypes import DType
from memplan.graph.tensors import allocated_bytes
from memplan.memory.account import ComponentKind, Entry, HostMemory, RankAccount, make_phase
from memplan.memory.engine_options import OptionReader, option_names
from memplan.memory.moments import Held, Moments, crest_of, moved_backward, moved_forward
from memplan.memory.rank import RankInput
from memplan.memory.states import (
    load_entries,
    parameter_bytes,
    state_entries,
    trainable_state_bytes,
)
from memplan.memory.step import BackwardPass
from memplan.memory.walk import Interval
from memplan.records import dataclass
from memplan.training.optimizers import OPTIMIZERS
from memplan.training.setup import TrainingSetup
from memplan.units import MIB

FIRST_BUCKET_BYTES = 1 * MIB
"""Cap of the first bucket to be reduced (``_DEFAULT_FIRST_BUCKET_BYTES``)."""
DEFAULT_BUCKET_CAP_MB = 25.0
"""Cap of the others [MiB] (``bucket_cap_mb``)."""


class CommHook(Enum):
    """How a bucket is reduced."""

    ALLREDUCE = "allreduce"
    """In place."""
    BF16_COMPRESS = "bf16_compress"
    """Through a copy in bf16."""
    FP16_COMPRESS = "fp16_compress"
    """Through a copy in fp16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions:
    """DDP's own settings; the field names are the option names."""

    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets instead of tensors beside them."""
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    comm_hook: CommHook = CommHook.ALLREDUCE
    sync_each_batch: bool = False
    """Reduce at every micro-batch; else all but the last run under ``no_sync``, as accelerate does."""
    static_graph: bool = False
    """Changes when buckets are reduced, not what is held."""
    find_unused_parameters: bool = False
    """Changes what is reduced, not what is held."""
    broadcast_buffers: bool = True
    """Sends buffers in place."""

    @classmethod
    def of(cls, setup: TrainingSetup) -> "DdpOptions":
        """Read them from a setup.

        Raises ``SetupError`` for options that do not exist or cannot be.
        """
        read = OptionReader(setup, option_names(cls))
        return cls(
            gradient_as_bucket_view=read.boolean("gradient_as_bucket_view", default=False),
            bucket_cap_mb=read.number("bucket_cap_mb", DEFAULT_BUCKET_CAP_MB),
            comm_hook=read.member("comm_hook", CommHook.ALLREDUCE),
            sync_each_batch=read.boolean("sync_each_batch", default=False),
            static_graph=read.boolean("static_graph", default=False),
            find_unused_parameters=read.boolean("find_unused_parameters", default=False),
            broadcast_buffers=read.boolean("broadcast_buffers", default=True),
        )


def ddp_account(given: RankInput) -> RankAccount:
    """The account of one rank of DDP; on one GPU, of the same loop without DDP.

    Raises ``SetupError`` for options that do not exist or cannot be.
    """
    options = DdpOptions.of(given.setup)
    buckets = bucket_entry(given)
    states = [*state_entries(given), buckets]
    replay = DdpReplay(given, options)
    replay.run()
    phases = (
        make_phase("load", [*load_entries(given), buckets]),
        make_phase("forward", [*states, *replay.forward_moments.entries()]),
        make_phase("backward", [*states, *replay.backward_moments.entries()]),
        make_phase("step", [*states, *_step_entries(given, replay)]),
        make_phase("save", [*states]),
    )
    whole = parameter_bytes(given.tape)
    return RankAccount(
        phases=phases,
        held_bytes=sum(entry.num_bytes for entry in states),
        host=HostMemory(load_bytes=whole, save_bytes=-(-whole // given.setup.gpus_per_node)),
    )


def bucket_entry(given: RankInput) -> Entry:
    """All buckets: as many bytes as the gradients; none on one GPU."""
    size = 0
    if given.setup.data_parallel > 1:
        size = sum(
            parameter.numel * parameter.dtype.num_bytes * segment.num_copies
            for segment in given.tape.segments
            for parameter in segment.parameters
            if parameter.requires_grad
        )
    return Entry(
        ComponentKind.COMMUNICATION_BUFFERS,
        -(-size // 512) * 512,
        "buckets that hold a copy of every gradient",
    )


def _step_entries(given: RankInput, replay: "DdpReplay") -> list[Entry]:
    copies = OPTIMIZERS[given.setup.optimizer].num_step_copies * trainable_state_bytes(given)
    return [
        Entry(
            ComponentKind.GRADIENTS,
            replay.held.gradients_bytes,
            "one for each trained parameter, beside its bucket",
        ),
        Entry(ComponentKind.TEMPORARIES, copies, "copies the optimizer makes of a state"),
    ]


class DdpReplay:
    """Forward and backward of the fullest micro-batch: the last one."""

    def __init__(self, given: RankInput, options: DdpOptions) -> None:
        self.given = given
        self.options = options
        self.passes = given.passes
        several = given.setup.gradient_accumulation_steps > 1
        self.bucketed = given.setup.data_parallel > 1
        self.views = self.bucketed and options.gradient_as_bucket_view
        self.accumulates = several and not (self.views and options.sync_each_batch)
        """Whole gradients of earlier micro-batches are there."""
        total = sum(each.gradient_bytes * each.repeats for each in self.passes.backward)
        self.held = Held(gradients_bytes=total if self.accumulates else 0)
        self.forward_moments = Moments(self.held)
        self.backward_moments = Moments(self.held)

    @property
    def _piles_up(self) -> bool:
        return not self.views and not self.accumulates

    def run(self) -> None:
        """Forward, then backward."""
        for each in self.passes.forward:
            for repetition in {0, each.segment.repeat - 1}:
                self.forward_moments.see(
                    each.start, moved_forward(each, repetition), each.peak, loss=each.loss
                )
        self.backward_moments.see(self.passes.after_forward)
        if self.bucketed and self.options.comm_hook is not CommHook.ALLREDUCE:
            self._backward_with_copies()
        else:
            for part in self.passes.backward:
                self._backward(part)
        self.backward_moments.see(self.passes.after_backward)
        if self.views:
            self.held.gradients_bytes = 0

    def _backward(self, each: BackwardPass) -> None:
        crest = crest_of(each.intervals, pile_up=self._piles_up)
        before = self.held.gradients_bytes
        finished = each.gradient_bytes
        for repetition in {0, each.repeats - 1}:
            change = self._after(repetition * finished)
            self.held.gradients_bytes = before + change
            self.backward_moments.see(
                each.start,
                moved_backward(each, repetition),
                crest.level,
                loss=each.loss,
                gradients_bytes=crest.finished_bytes,
            )
        self.held.gradients_bytes = before + self._after(each.repeats * finished)

    def _after(self, finished: int) -> int:
        """How finished gradients change what lies beside the buckets."""
        if self._piles_up:
            return finished
        # In the last micro-batch gradients left by no_sync become views one by one.
        return -finished if self.views and self.accumulates else 0

    def _backward_with_copies(self) -> None:
        """Interval by interval, since a full bucket is copied to 16 bits when it is ready."""
        held, moments = self.held, self.backward_moments
        cap = FIRST_BUCKET_BYTES
        filled = 0
        for each, repetition, interval in _intervals(self.passes.backward):
            moved = moved_backward(each, repetition)
            moments.see(each.start, moved, interval.peak, loss=each.loss)
            held.gradients_bytes += self._after(interval.gradient_bytes)
            filled += interval.gradient_bytes
            if filled < cap:
                continue
            copy = filled // DType.FP32.num_bytes * DType.BF16.num_bytes
            self._see_copy(each, repetition, interval, copy)
            filled = 0
            cap = int(self.options.bucket_cap_mb * MIB)
        last = self.passes.after_backward
        held.buffers_bytes += allocated_bytes(filled // 4, DType.BF16)
        moments.see(last)
        held.buffers_bytes = 0

    def _see_copy(
        self, each: BackwardPass, repetition: int, interval: Interval, num_bytes: int
    ) -> None:
        if self._copies_to_other_format:
            self.held.buffers_bytes = num_bytes
            self.backward_moments.see(
                each.start, moved_backward(each, repetition), interval.end, loss=each.loss
            )
            self.held.buffers_bytes = 0

    @property
    def _copies_to_other_format(self) -> bool:
        return self.given.formats.gradients is DType.FP32


def _intervals(passes: list[BackwardPass]) -> Iterator[tuple[BackwardPass, int, Interval]]:
    for each in passes:
        for repetition in range(each.repeats):
            for interval in each.intervals:
                yield each, repetition, interval
