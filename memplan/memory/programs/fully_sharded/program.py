"""FSDP2's allocations (torch 2.13, torch/distributed/fsdp/_fully_shard).

Three streams take part: the main one, that of the all-gather's copies, and that of the reduction;
with replicas a fourth, which adds up over them. A
block stays with the stream on which it was made, so each has segments of its own. The order is that
of ``_fsdp_param_group.py`` (``unshard``, ``wait_for_unshard``, ``post_backward``,
``_backward_prefetch``), ``_fsdp_collectives.py`` (``foreach_all_gather``, ``foreach_reduce``) and
``_fsdp_state.py`` (``_root_post_backward_final_callback``).
"""

from functools import cached_property

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.fsdp2.options import Wrapping
from memplan.memory.programs.fully_sharded.holding import UnitUse
from memplan.memory.programs.fully_sharded.reducing import ReducingGradients
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.stops import Acts, Stops
from memplan.model.parameters import ModelPart
from memplan.training.splitting.exchange import ExchangeKind, Hiding

GATHER_STREAM = 1
_TAIL_HOOK, _UNIT_HOOK = (0, 0), (1, 0)
_BEFORE_FIRST = Stops(before_backward={0: [_UNIT_HOOK]})
_BUFFERS, _GATHERED = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GATHERED_PARAMETERS
_TABLE = "which gathered parameter is where"


class Fsdp2Program(ReducingGradients):
    """One rank of ``fully_shard``."""

    def __init__(
        self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0, rank: int = 0
    ) -> None:
        super().__init__(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
        self.in_tail = False
        """The tail's backward pass has begun."""
        self.has_ended = False
        """The backward pass of the layer at hand has come to the hook before what it is given."""
        self.tells_ahead = bool(self.grouped) and self.options.wrapping is Wrapping.TORCHTITAN
        self.kept_all_gather: Block | None = None

    # -- gathering -------------------------------------------------------------------------------

    def _copy_in(self, use: UnitUse) -> None:
        """Shards in the compute format, then the all-gather, whose result stays."""
        unit, ledger = use.unit, self.ledger
        copies = []
        if unit.copy_in_bytes:
            copies.append(
                ledger.allocate(unit.copy_in_bytes, GATHER_STREAM, _BUFFERS, "shards to gather")
            )
        if unit.largest_cast_numel:
            # ``_ToFloat8ConstrFunc``: a shard scaled, and clamped, before it is cast.
            size = allocated_bytes(unit.largest_cast_numel, DType.FP32)
            name = "a shard on its way to fp8"
            ledger.use(size, size, stream=GATHER_STREAM, kind=_BUFFERS, name=name)
        if unit.upload_bytes:
            name = "shards from the CPU"
            ledger.use(unit.upload_bytes, stream=GATHER_STREAM, kind=_BUFFERS, name=name)
        if self.offloaded:
            ledger.exchange(ExchangeKind.TO_GPU, unit.shard_bytes, hiding=Hiding.AHEAD)
        ledger.exchange(ExchangeKind.COPY, unit.copy_in_bytes + unit.shard_bytes)
        ledger.exchange(
            ExchangeKind.ALL_GATHER, unit.all_gather_bytes, self._ranks_of(use), Hiding.AHEAD
        )
        use.all_gather = ledger.allocate(
            unit.all_gather_bytes, GATHER_STREAM, _BUFFERS, "result of an all-gather"
        )
        for block in copies:
            ledger.free(block)

    def _copy_out(self, use: UnitUse) -> None:
        unit, ledger, copy = use.unit, self.ledger, use.copy
        ledger.exchange(ExchangeKind.COPY, 2 * unit.gathered_bytes)
        turned = []
        for parameter, size, is_turned in unit.gathered:
            use.gathered.append(ledger.allocate(size, 0, _GATHERED, (parameter, copy)))
            if is_turned:
                name = "gathered shards in the ranks' order"
                turned.append(ledger.allocate(size, 0, _BUFFERS, name))
        if unit.gather_table_bytes:
            ledger.use(unit.gather_table_bytes, kind=ComponentKind.KERNEL_SCRATCH, name=_TABLE)
        ledger.free_all(reversed(turned))

    def _drop_kept(self) -> None:
        if self.kept_all_gather is not None:
            self.ledger.free(self.kept_all_gather)
            self.kept_all_gather = None

    def _unshard_forward(self, use: UnitUse) -> None:
        """Gather; the unit before keeps its all-gather's result until this one is copied out."""
        if use.gathered:
            return
        if use.unit.degree == 1:
            self._copy_out(use)
            self._drop_kept()
            return
        if use.all_gather is None:
            self._copy_in(use)
        self._copy_out(use)
        self._drop_kept()
        self.kept_all_gather, use.all_gather = use.all_gather, None

    def _post_forward(self, use: UnitUse) -> None:
        if use.unit.reshard:
            self._reshard(use)
        self.order.append(use)

    # -- forward ---------------------------------------------------------------------------------

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Gather what the segment needs."""
        if not self.order and self.root is not None:
            self._unshard_forward(self.root)
        uses = self._uses_in(segment, repetition)
        for use in uses:
            self._unshard_forward(use)
        if uses:
            self._gather_ahead(uses[0], 1)
            return
        for single in (self.embedding, self.tail):
            if single is not None and self._owns(single, segment):
                self._unshard_forward(single)
                self._gather_ahead(single, 1)

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """Let the layer's parameters go."""
        uses = self._uses_in(segment, repetition)
        for use in uses:
            self._post_forward(use)
        if not uses and self.embedding is not None and self._owns(self.embedding, segment):
            self._post_forward(self.embedding)

    def _gather_ahead(self, use: UnitUse, step: int) -> None:
        """Gather for the module behind one, or for that before it, the last of its groups first.

        In backward torch does so for modules of two groups (``_backward_prefetch``); torchtitan tells each
        module of the next one where experts are spread (``apply_fsdp_to_decoder``).
        """
        if not self.tells_ahead and (step > 0 or use is self.tail):
            return
        position = self.places.get(use)
        if position is None or not 0 <= position + step < len(self.sequence):
            return
        for other in self.sequence[position + step][::step]:
            if not other.gathered and other.all_gather is None and other.unit.degree > 1:
                self._copy_in(other)

    @cached_property
    def sequence(self) -> list[list[UnitUse]]:
        """Modules in the order in which they run, the groups of parameters of each; empty where none has
        two."""
        if not self.units.beside:
            return []
        layers = [
            self._uses_in(segment, repetition)
            for segment in self.given.tape.segments
            for repetition in range(segment.repeat)
        ]
        ends = ([each] if each is not None else [] for each in (self.embedding, self.tail))
        first, last = ends
        return [uses for uses in (first, *layers, last) if uses]

    @cached_property
    def places(self) -> dict[UnitUse, int]:
        """Where each stands in that order."""
        return {uses[0]: position for position, uses in enumerate(self.sequence)}

    def end_forward(self) -> None:
        """The tail's and the root's forward pass ends."""
        for use in (self.tail, self.root):
            if use is not None:
                self._post_forward(use)
        self._drop_kept()

    def end_pass(self) -> None:
        """Without a backward pass the order of this one is of no use."""
        self.order.clear()

    def take_over(self, other: Program) -> None:
        """What a unit's last forward pass left gathered is there for the next, whoever's it is."""
        assert isinstance(other, Fsdp2Program)
        for mine, theirs in zip(self._uses(), other._uses(), strict=True):
            if theirs.gathered:
                mine.gathered, theirs.gathered = theirs.gathered, []

    # -- backward --------------------------------------------------------------------------------

    def _pre_backward(self, use: UnitUse) -> None:
        """Gather unless it was prefetched, and prefetch the unit whose forward pass came before."""
        if not use.gathered:
            if use.unit.degree == 1:
                self._copy_out(use)
            else:
                if use.all_gather is None:
                    self._copy_in(use)
                self._copy_out(use)
                assert use.all_gather is not None
                self.ledger.free(use.all_gather)
                use.all_gather = None
        if (self.tells_ahead and use is self.tail) or id(use.unit) in self.grouped:
            return  # ``_gather_ahead`` says what comes next
        before = self.order.beside(use, -1)
        if (
            before is not None
            and not before.gathered
            and before.all_gather is None
            and before.unit.degree > 1
        ):
            self._copy_in(before)

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """Gather what the segment needs."""
        self.reach_model(segment)
        uses = self._uses_in(segment, repetition)
        if uses:
            if segment.output is not None and segment.output.requires_grad:
                for use in uses:
                    self._pre_backward(use)
                self._gather_ahead(uses[0], -1)
            return
        single = self.embedding
        if single is not None and self._owns(single, segment) and not single.gathered:
            self._pre_backward(single)

    def stops(self, segment: Segment) -> Stops | None:
        """The tail's hook fires when the gradient of what it returns arrives, that of a layer's arguments before these
        have theirs."""
        if self._uses_in(segment, 0):
            return _BEFORE_FIRST if _hands_arguments_on(segment) else None
        tail = self.tail
        if tail is None or segment.is_layer:
            return None
        of_parameter = self.units.of_parameter
        products = [
            position
            for position, operation in enumerate(segment.operations)
            for tensor in operation.inputs
            if isinstance(tensor, Parameter) and of_parameter.get(tensor) is tail.unit
        ]
        if not products or segment is self.given.tape.segments[0]:
            return None
        return Stops(before_backward={products[-1]: [_TAIL_HOOK]})

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """A layer's arguments are to have their gradients; or the tail's backward pass begins, with the last of its
        modules."""
        if _UNIT_HOOK in acts:
            self._post_backwards(segment, repetition)
            self.has_ended = True
        elif self.tail is not None and not self.in_tail:
            self.in_tail = True
            self._pre_backward(self.tail)
            self._gather_ahead(self.tail, -1)

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """It waits for the end of its unit's backward pass."""
        use = self._use_of(weight)
        present = use.gradients.get(weight[0])
        if present is not None:
            self.ledger.free(block)
        else:
            use.gradients[weight[0]] = block

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """Reduce the layer's gradients."""
        if self._uses_in(segment, repetition):
            if not self.has_ended:
                self._post_backwards(segment, repetition)
            self.has_ended = False
            return
        ends_tail = self.tail is not None and segment.part is ModelPart.NORM
        if ends_tail and self.tail is not None and not self.units.tied and not self.tail.done:
            self._post_backward(self.tail)

    def _post_backwards(self, segment: Segment, repetition: int) -> None:
        """Those of the layer's units."""
        given = segment.input
        if given is not None and given.requires_grad:
            for use in reversed(self._uses_in(segment, repetition)):
                self._post_backward(use)

    def end_backward(self) -> None:
        """Units whose input needs no gradient, the root first, are reduced when all is over."""
        for use in self._uses():
            if not use.done:
                self._post_backward(use)
            if use.all_gather is not None:
                # Prefetched for a frozen unit that the backward pass never came to.
                self.ledger.free(use.all_gather)
                use.all_gather = None
        self.drop_reduced()
        for use in self._uses():
            use.done = False
        self.in_tail = False
        self.order.clear()


def _hands_arguments_on(segment: Segment) -> bool:
    """Whether a layer begins with a node of what it is given beside the hidden states (``Module.behind_hook``)."""
    first = segment.operations[0]
    is_node = first.kind is OperationKind.VIEW and bool(first.gradients)
    return is_node and any(each.storage in segment.external_reads for each in first.inputs)
