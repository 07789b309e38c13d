"""What Megatron's data-parallel ranks send one another: gradients behind, and weights ahead.

Megatron-core 0.16.1, core/distributed/param_and_grad_buffer.py (``start_grad_sync``, ``start_param_sync``). Without
overlapping, both are waited for as a whole; with it a bucket is reduced as soon as its last gradient is there,
and gathered while the forward pass comes to it.
"""

from memplan.graph.core.segments import Segment
from memplan.memory.megatron.buffers import Group
from memplan.memory.megatron.options import MegatronStates
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks


class Reducer:
    """Of one rank, or of one stage of it."""

    def __init__(
        self, given: RankInput, ledger: Ledger, states: MegatronStates, groups: list[Group]
    ) -> None:
        setup = given.setup
        self.ledger = ledger
        self.states = states
        self.groups = [(each, Ranks(each.num_ranks, each.stride)) for each in groups]
        self.weight_bytes = given.formats.weights.num_bytes
        self.gradient_bytes = states.main_gradients(given.formats.weights).num_bytes
        self.bucket = states.bucket_size(setup.data_parallel * setup.context_parallel)
        self.is_last = True
        """The micro-batch is the last one of its step."""
        self.is_gathered = True
        """All weights are as the last step left them."""
        self.filled = [0] * len(groups)
        """Gradients of each group that wait in a bucket."""
        self.sizes = {segment.index: self._sizes(segment) for segment in given.tape.segments}

    def _sizes(self, segment: Segment) -> list[int]:
        """Elements of one repetition's weights, by group."""
        found = [0] * len(self.groups)
        for parameter in segment.parameters:
            is_apart = parameter.experts is not None
            places = [n for n, (each, _) in enumerate(self.groups) if each.is_spread is is_apart]
            found[places[0] if places else 0] += parameter.numel
        return found

    @property
    def kind(self) -> ExchangeKind:
        """How gradients are reduced."""
        sharded = self.states.use_distributed_optimizer
        return ExchangeKind.REDUCE_SCATTER if sharded else ExchangeKind.ALL_REDUCE

    def gather(self, segment: Segment) -> None:
        """The weights that a stretch of the first forward pass needs."""
        if self.is_gathered:
            return
        for (_, ranks), numel in zip(self.groups, self.sizes[segment.index], strict=True):
            size = numel * self.weight_bytes
            self._send(ExchangeKind.ALL_GATHER, size, ranks, Hiding.AHEAD)

    def reduce(self, segment: Segment) -> None:
        """The gradients that a stretch of the last backward pass has made."""
        if self.bucket is None or not self.is_last:
            return
        for place, numel in enumerate(self.sizes[segment.index]):
            self.filled[place] += numel
            if self.filled[place] >= self.bucket:
                self._reduce(place)

    def flush(self) -> None:
        """What is left of them."""
        for place, numel in enumerate(self.filled):
            if numel:
                self._reduce(place)

    def _reduce(self, place: int) -> None:
        size = self.filled[place] * self.gradient_bytes
        self._send(self.kind, size, self.groups[place][1], Hiding.BEHIND)
        self.filled[place] = 0

    def before_step(self) -> None:
        """All gradients, where they were not reduced as they came."""
        if self.bucket is not None:
            return
        for group, ranks in self.groups:
            self._send(self.kind, group.buffer.numel * self.gradient_bytes, ranks, Hiding.NONE)

    def after_step(self) -> None:
        """All weights, where they are not gathered as they are needed."""
        if not self.states.use_distributed_optimizer:
            return
        self.is_gathered = not self.states.overlap_param_gather
        if not self.is_gathered:
            return
        for group, ranks in self.groups:
            size = group.buffer.numel * self.weight_bytes
            self._send(ExchangeKind.ALL_GATHER, size, ranks, Hiding.NONE)

    def _send(self, kind: ExchangeKind, num_bytes: int, ranks: Ranks, hiding: Hiding) -> None:
        if ranks.degree > 1:
            self.ledger.exchange(kind, num_bytes, ranks, hiding)
