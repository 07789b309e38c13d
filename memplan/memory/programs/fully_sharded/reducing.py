"""What becomes of gradients under FSDP2 (``foreach_reduce``): they wait for their unit, and are reduced together."""

from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.fsdp2.units import cut_dimension
from memplan.memory.programs.fully_sharded.holding import HoldingShards, UnitUse
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks

REDUCE_STREAM, REPLICA_STREAM = 2, 3
_BUFFERS = ComponentKind.COMMUNICATION_BUFFERS


class ReducingGradients(HoldingShards):
    """One rank of ``fully_shard``, behind a unit's backward pass."""

    def __init__(
        self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0, rank: int = 0
    ) -> None:
        super().__init__(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
        self.reduce_inputs: list[Block] = []
        self.replicated = self.options.data_parallel_replicate_degree > 1
        self.all_reduced: list[Block] = []
        """Added up over the replicas and cast; held until the backward pass is over."""

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """The last micro-batch reduces, or each does."""
        self.reduces = last or self.options.sync_each_batch
        super().micro_batch(step, first=first, last=last)

    def drop_reduced(self) -> None:
        """The backward pass is over, and with it every reduction."""
        self.ledger.free_all([*self.reduce_inputs, *self.all_reduced])
        self.reduce_inputs.clear()
        self.all_reduced.clear()

    def _post_backward(self, use: UnitUse) -> None:
        """Reshard, then reduce the unit's gradients, or keep them for the last micro-batch (``post_backward``)."""
        use.done = True
        self._add_to_whole(use)
        if self.reduces:
            self._match_shares(use)
        self._reshard(use)
        if self.reduces:
            self._reduce(use)
        else:
            self._make_whole(use)

    def _reduce(self, use: UnitUse) -> None:
        """Lay the unit's gradients side by side and reduce them over its ranks."""
        unit, ledger = use.unit, self.ledger
        if id(unit) not in self.grouped or id(unit) in self.second:
            # Once for each module, by the group that is done first.
            while len(self.reduce_inputs) >= self.options.reduce_scatter_max_input_buffers:
                ledger.free(self.reduce_inputs.pop(0))
        gradients = {**use.gradients, **use.whole}
        if not unit.num_trained or not gradients:
            return
        blocks = [gradients[each] for each in unit.parameters if each in gradients]
        # Of several ranks each looks at how every gradient is cut: its loop's variable holds the last.
        last = blocks[-1] if unit.degree > 1 else None
        if cut_dimension(unit.parameters[0], unit.degree):
            blocks = self._turned(use, gradients)
        elif last is not None:
            blocks.pop()
        ledger.exchange(ExchangeKind.COPY, 2 * unit.reduce_input_bytes)
        ledger.exchange(
            ExchangeKind.REDUCE_SCATTER, unit.reduce_input_bytes, self._ranks_of(use), Hiding.BEHIND
        )
        self.reduce_inputs.append(
            ledger.allocate(unit.reduce_input_bytes, 0, _BUFFERS, "gradients to reduce")
        )
        if self.given.setup.kernel_scratch and unit.reduce_table_bytes:
            name = "where gradients lie that are copied together"
            ledger.use(unit.reduce_table_bytes, kind=ComponentKind.KERNEL_SCRATCH, name=name)
        for block in blocks:
            ledger.free(block)
        self._keep_shards(use)
        if last is not None:
            ledger.free(last)
        use.gradients.clear()
        use.whole.clear()

    def _turned(self, use: UnitUse, gradients: dict[Parameter, Block]) -> list[Block]:
        """Gradients that are cut by columns, laid out rank by rank; the last one as it was stays."""
        found: list[Block] = []
        seen: list[Block] = []
        for parameter in use.unit.parameters:
            if parameter not in gradients:
                continue
            whole = parameter in use.whole
            dtype = (self.formats.reduce_of if whole else self.formats.compute_of)(parameter)
            for block in seen:
                self.ledger.free(block)
            size = allocated_bytes(parameter.numel, dtype)
            weight = parameter, use.copy
            found.append(self.ledger.allocate(size, 0, ComponentKind.GRADIENTS, weight))
            seen = [gradients[parameter]]
        return found

    def _match_shares(self, use: UnitUse) -> None:
        """Gradients split over tensor-parallel ranks as their weights are (``_get_grad_inner_tensor``)."""
        for table, dtype_of in (
            (use.whole, self.formats.reduce_of), (use.gradients, self.formats.compute_of)
        ):  # fmt: skip
            for parameter, block in table.items():
                if parameter.has_gradient_apart:
                    size = allocated_bytes(parameter.numel, dtype_of(parameter))
                    weight = parameter, use.copy
                    made = self.ledger.allocate(size, 0, ComponentKind.GRADIENTS, weight)
                    self.ledger.free(block)
                    table[parameter] = made

    def _add_to_whole(self, use: UnitUse) -> None:
        """What earlier micro-batches left takes new gradients up (``accumulate_unsharded_grad_if_needed``)."""
        if not use.whole:
            return
        for parameter in use.unit.parameters:
            if parameter in use.whole and parameter in use.gradients:
                self.ledger.free(use.gradients.pop(parameter))

    def _make_whole(self, use: UnitUse) -> None:
        """Under ``no_sync`` gradients are cast to the format they are reduced in (``to_accumulated_grad_if_needed``)."""
        formats, ledger = self.formats, self.ledger
        for parameter in use.unit.parameters if use.gradients else ():
            block = use.gradients.get(parameter)
            dtype = formats.reduce_of(parameter)
            if block is not None and dtype is not formats.compute_of(parameter):
                size = allocated_bytes(parameter.gradient_numel, dtype)
                weight = parameter, use.copy
                use.whole[parameter] = ledger.allocate(size, 0, ComponentKind.GRADIENTS, weight)
                ledger.free(use.gradients.pop(parameter))

    def _keep_shards(self, use: UnitUse) -> None:
        """The reduced shards, cast to the kept format."""
        unit, ledger = use.unit, self.ledger
        gradients = ComponentKind.GRADIENTS
        name = "reduced gradients"
        reduced = ledger.allocate(unit.reduce_output_bytes, REDUCE_STREAM, gradients, name)
        if self.replicated:
            replicas = Ranks(
                self.options.data_parallel_replicate_degree, self.ranks.stride * self.ranks.degree
            )
            size = unit.reduce_output_bytes
            ledger.exchange(ExchangeKind.ALL_REDUCE, size, replicas, Hiding.BEHIND)
        if self.offloaded:
            ledger.exchange(ExchangeKind.TO_HOST, unit.gradient_shard_bytes, hiding=Hiding.BEHIND)
        if unit.casts_reduced:
            stream = REPLICA_STREAM if self.replicated else REDUCE_STREAM
            cast = ledger.allocate(unit.gradient_shard_bytes, stream, gradients, name)
            if self.replicated:
                self.all_reduced.append(reduced)
            else:
                ledger.free(reduced)
            reduced = cast
        if self.offloaded or use.gradient_shards is not None:
            ledger.free(reduced)
        else:
            use.gradient_shards = reduced
