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
from memplan.training.precision import PrecisionFormats
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


_COMPRESSED = {CommHook.BF16_COMPRESS: DType.BF16, CommHook.FP16_COMPRESS: DType.FP16}


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions:
    """DDP's own settings; the field names are the option names."""

    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets instead of tensors beside them."""
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    """Gradients reduced at once, but for the first bucket, which is small [MiB]."""
    comm_hook: CommHook = CommHook.ALLREDUCE
    """How a bucket is reduced."""
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


def compressed_format(options: DdpOptions, formats: PrecisionFormats) -> DType | None:
    """What buckets are copied to; None where they are not, as gradients that have that format
    already (``Tensor.to`` then returns the bucket itself).
    """
    compressed = _COMPRESSED.get(options.comm_hook)
    return None if compressed is formats.gradients else compressed


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


class GradientFlow(Enum):
    """What becomes of the gradients beside the buckets in one micro-batch."""

    PILE_UP = "pile up"
    """The first of a step: each stays where autograd put it."""
    ADD = "add"
    """Each is added to that of the micro-batches before."""
    BECOME_VIEWS = "become views"
    """The last after ``no_sync``: each that lay there is let go for a view of its bucket."""
    VIEWS = "views"
    """None lies there: they are views of their buckets."""


class DdpReplay:
    """Forward and backward of the micro-batches that may be the fullest."""

    def __init__(self, given: RankInput, options: DdpOptions) -> None:
        self.given = given
        self.options = options
        self.passes = given.passes
        self.bucketed = given.setup.data_parallel > 1
        self.views = self.bucketed and options.gradient_as_bucket_view
        self.total_bytes = sum(each.gradient_bytes * each.repeats for each in self.passes.backward)
        self.flow = GradientFlow.PILE_UP
        self.held = Held()
        self.forward_moments = Moments(self.held)
        self.backward_moments = Moments(self.held)

    def run(self) -> None:
        """Each kind of micro-batch; then what the optimizer finds."""
        *unsynced, last = self._flows()
        for flow in unsynced:
            self._micro_batch(flow, None)
        self._micro_batch(last, self._compressed)
        self.held.gradients_bytes = 0 if self.views else self.total_bytes

    def _flows(self) -> list[GradientFlow]:
        """Those of a step's micro-batches, but for what another one exceeds; the last is reduced.

        Under ``no_sync`` views are whole gradients too, until the last micro-batch.
        """
        steps = self.given.setup.gradient_accumulation_steps
        if not self.views:
            return [GradientFlow.PILE_UP if steps == 1 else GradientFlow.ADD]
        if steps == 1 or self.options.sync_each_batch:
            return [GradientFlow.VIEWS]
        earlier = GradientFlow.PILE_UP if steps == 2 else GradientFlow.ADD
        return [earlier, GradientFlow.BECOME_VIEWS]

    def _micro_batch(self, flow: GradientFlow, compressed: DType | None) -> None:
        """Forward, then backward."""
        self.flow = flow
        whole = flow in (GradientFlow.ADD, GradientFlow.BECOME_VIEWS)
        self.held.gradients_bytes = self.total_bytes if whole else 0
        for each in self.passes.forward:
            for repetition in {0, each.segment.repeat - 1}:
                self.forward_moments.see(
                    each.start, moved_forward(each, repetition), each.peak, loss=each.loss
                )
        self.backward_moments.see(self.passes.after_forward)
        if compressed is not None:
            self._backward_with_copies(compressed)
        else:
            for part in self.passes.backward:
                self._backward(part)
        self.backward_moments.see(self.passes.after_backward)

    def _backward(self, each: BackwardPass) -> None:
        crest = crest_of(each.intervals, pile_up=self.flow is GradientFlow.PILE_UP)
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
        if self.flow is GradientFlow.PILE_UP:
            return finished
        return -finished if self.flow is GradientFlow.BECOME_VIEWS else 0

    @property
    def _compressed(self) -> DType | None:
        return compressed_format(self.options, self.given.formats) if self.bucketed else None

    def _backward_with_copies(self, compressed: DType) -> None:
        """Interval by interval, since a full bucket is copied to 16 bits when it is ready."""
        held, moments = self.held, self.backward_moments
        element_bytes = self.given.formats.gradients.num_bytes
        cap = FIRST_BUCKET_BYTES
        filled = 0
        for each, repetition, interval in _intervals(self.passes.backward):
            moved = moved_backward(each, repetition)
            moments.see(each.start, moved, interval.peak, loss=each.loss)
            held.gradients_bytes += self._after(interval.gradient_bytes)
            filled += interval.gradient_bytes
            if filled < cap:
                continue
            held.buffers_bytes = allocated_bytes(filled // element_bytes, compressed)
            moments.see(each.start, moved, interval.end, loss=each.loss)
            held.buffers_bytes = 0
            filled = 0
            cap = int(self.options.bucket_cap_mb * MIB)
        held.buffers_bytes = allocated_bytes(filled // element_bytes, compressed)
        moments.see(self.passes.after_backward)
        held.buffers_bytes = 0


def _intervals(passes: list[BackwardPass]) -> Iterator[tuple[BackwardPass, int, Interval]]:
    for each in passes:
        for repetition in range(each.repeats):
            for interval in each.intervals:
                yield each, repetition, interval
