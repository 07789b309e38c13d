"""DistributedDataParallel's buffers (torch 2.13, torch/csrc/distributed/c10d/reducer.cpp).

At construction the parameters are sent in coalesced pieces, and there is one bucket for each
``bucket_cap_mb``, the first one smaller; but the buckets of the first step are made from the order of
the parameters alone, with no cap at all where ``find_unused_parameters`` is off. When the order in
which gradients come is known, the buckets are made again, before the second forward pass
(``rebuild_buckets``).
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from memplan.dtypes import DType
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.ddp import DdpOptions, compressed_format
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight, is_trained, runs_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks
from memplan.units import MIB, round_up

_BUFFERS, _BUCKET = ComponentKind.COMMUNICATION_BUFFERS, "gradient bucket"
_SENT = "parameters sent to all ranks"
Flat = tuple[int, DType]
"""What a tensor takes beside others of its format [bytes]."""

BROADCAST_BYTES = 250 * MIB
"""Parameters sent in one piece (torch/nn/parallel/distributed.py, ``broadcast_bucket_size``)."""
BROADCASTS_ON_THE_WAY = 2


class DdpProgram(Program):
    """One rank of several."""

    num_steps = 3
    """The buckets of the second step are not those of the first."""

    def __init__(self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(given, ledger, workspace_bytes=workspace_bytes)
        self.options = DdpOptions.of(given.setup)
        self.buckets: list[Block] = []
        self.arrived: list[Weight] = []
        self.rebuilt = False
        self.reduces = True
        """This micro-batch reduces its gradients."""
        self.ranks = Ranks(given.setup.data_parallel, given.setup.tensor_parallel)
        self.compressed = compressed_format(self.options, given.formats)
        self.is_even = self.compressed is None
        self.waiting: list[int] = []
        """Gradients in each bucket that is not reduced yet."""
        self.lengths: list[int] = []
        """Gradients in each bucket, in the order in which they come."""
        self.filled = 0
        """Bytes in the bucket that is being filled."""
        self.buffers = [
            (each.numel * each.dtype.num_bytes, each.dtype)
            for run in runs_of(given.tape)
            for each in run.before
            if each.is_registered and self.options.broadcast_buffers
        ]
        self.sends_buffers = True
        """The next forward pass sends them (``_check_sync_bufs_pre_fwd``)."""

    def load(self) -> None:
        """The model; its parameters sent in pieces; one bucket for all gradients."""
        super().load()
        self._broadcast()
        handed = [parameter for parameter, _ in self.weights if parameter.requires_grad]
        sizes = [gradient_bytes(each) for each in handed]
        keeps = self._keeps_first_buckets
        pieces = coalesced(sizes, self.options.bucket_caps) if keeps else [sizes]
        come = map(is_trained, handed)  # a bucket has room for those that never do
        lengths = [sum(islice(come, len(piece))) for piece in pieces]
        # The last parameters' gradients come first.
        self._make_buckets(pieces[::-1], lengths[::-1])

    @property
    def _keeps_first_buckets(self) -> bool:
        """Buckets have their caps at once, and stay, where the order of gradients may change."""
        return self.options.find_unused_parameters and not self.options.static_graph

    def _make_buckets(self, pieces: list[list[int]], lengths: list[int]) -> None:
        self.buckets = [
            self.ledger.allocate(allocated(sum(piece)), 0, _BUFFERS, _BUCKET) for piece in pieces
        ]
        self.lengths = [length for length in lengths if length]

    def _broadcast(self) -> None:
        """Its parameters, and the buffers behind them."""
        self._send([(gradient_bytes(each), each.dtype) for each, _ in self.weights] + self.buffers)

    def _send(self, tensors: list[Flat]) -> None:
        """Tensors flattened in pieces, two of them on their way; one alone needs no copy.

        (``torch/csrc/distributed/c10d/comm.cpp``, ``broadcast_coalesced``)
        """
        ledger = self.ledger
        on_the_way: list[Block | None] = []
        for piece in in_pieces(tensors, BROADCAST_BYTES):
            if len(on_the_way) == BROADCASTS_ON_THE_WAY:
                self._arrive(on_the_way.pop(0))
            flat = (
                ledger.allocate(allocated(sum(piece)), 0, _BUFFERS, _SENT)
                if len(piece) > 1
                else None
            )
            on_the_way.append(flat)
        for block in on_the_way:
            self._arrive(block)

    def _arrive(self, block: Block | None) -> None:
        if block is not None:
            self.ledger.free(block)

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """The last one reduces, or each; after the first that did the buckets are made again."""
        self.ledger.enter(Part.FORWARD, step)
        self.prepare_forward()
        self.prepare_backward(last=last or self.options.sync_each_batch)
        super().micro_batch(step, first=first, last=last)

    def prepare_forward(self) -> None:
        """Once the order in which gradients come is known, buckets are made again; then buffers are sent."""
        if self.arrived and not self.rebuilt and not self._keeps_first_buckets:
            self._rebuild()
        if self.sends_buffers:
            self._send(self.buffers)

    def prepare_backward(self, *, last: bool) -> None:
        """Whether gradients are reduced: those of the last micro-batch."""
        self.reduces = last
        self.sends_buffers = last
        self.waiting = list(self.lengths)

    def settle(self, *, num_micro_batches: int) -> None:  # noqa: ARG002
        """The first micro-batch finds out the order in which gradients come."""
        self.train(0, num_micro_batches=1)

    def _rebuild(self) -> None:
        for block in self.buckets:
            self.ledger.free(block)
        sizes = [gradient_bytes(parameter) for parameter, _ in self.arrived]
        pieces = coalesced(sizes, self.options.bucket_caps)
        self._make_buckets(pieces, [len(piece) for piece in pieces])
        self.rebuilt = True

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Copied into its bucket, where it is reduced, and with views replaced by one."""
        super().gradient_ready(weight, block)
        if not self.reduces:
            return
        if not self.rebuilt:
            self.arrived.append(weight)
        if self.options.gradient_as_bucket_view:
            self.ledger.free(self.gradients.pop(weight))
        self._fill(weight[0])

    def _fill(self, parameter: Parameter) -> None:
        """A full bucket is reduced; a hook that compresses makes a copy of it."""
        self.filled += gradient_bytes(parameter)
        self.waiting[0] -= 1
        if self.waiting[0]:
            return
        self.waiting.pop(0)
        sent = self.filled
        if not self.options.gradient_as_bucket_view:
            # Into the bucket, and out of it when the pass is over.
            self.ledger.exchange(ExchangeKind.COPY, 4 * self.filled)
        if self.compressed is not None:
            element_bytes = self.given.formats.gradients.num_bytes
            sent = self.filled // element_bytes * self.compressed.num_bytes
            self.ledger.exchange(ExchangeKind.COPY, 2 * (self.filled + sent))
            size = allocated_bytes(self.filled // element_bytes, self.compressed)
            self.ledger.use(size, kind=_BUFFERS, name="a bucket, compressed")
        self.ledger.exchange(ExchangeKind.ALL_REDUCE, sent, self.ranks, Hiding.BEHIND)
        self.filled = 0


def in_pieces(tensors: Iterable[Flat], cap: int) -> list[list[int]]:
    """Cut tensors of one format each into pieces, in the order of their first ones.

    >>> in_pieces([(5, DType.FP32), (1, DType.BOOL), (5, DType.FP32), (5, DType.FP32)], 10)
    [[5, 5], [1], [5]]
    """
    pieces: list[tuple[int, list[int]]] = []
    filling: dict[DType, tuple[int, list[int]]] = {}
    for number, (size, dtype) in enumerate(tensors):
        piece = filling.setdefault(dtype, (number, []))
        piece[1].append(size)
        if sum(piece[1]) >= cap:
            pieces.append(filling.pop(dtype))
    return [sizes for _, sizes in sorted([*pieces, *filling.values()])]


def gradient_bytes(parameter: Parameter) -> int:
    """A gradient in a flat tensor [bytes]."""
    return parameter.numel * parameter.dtype.num_bytes


def allocated(num_bytes: int) -> int:
    """As the allocator rounds it up [bytes]."""
    return round_up(num_bytes, ALLOCATION_ROUNDING)


def coalesced(sizes: list[int], caps: Sequence[int]) -> list[list[int]]:
    """Cut sizes into pieces: each ends with the one that reaches its cap.

    ``caps`` are those of the first pieces; the last one is also that of all further ones
    (``compute_bucket_assignment_by_size``).

    >>> coalesced([5, 9, 1, 5], [4, 10])
    [[5], [9, 1], [5]]
    """
    pieces: list[list[int]] = []
    piece: list[int] = []
    total = 0
    for size in sizes:
        piece.append(size)
        total += size
        if total >= caps[min(len(pieces), len(caps) - 1)]:
            pieces.append(piece)
            piece, total = [], 0
    return [*pieces, piece] if piece else pieces
