"""FSDP2's allocations (torch 2.13, torch/distributed/fsdp/_fully_shard).

Three streams take part: the main one, that of the all-gather's copies, and that of the reduction;
with replicas a fourth, which adds up over them. A
block stays with the stream on which it was made, so each has segments of its own. The order is that
of ``_fsdp_param_group.py`` (``unshard``, ``wait_for_unshard``, ``post_backward``,
``_backward_prefetch``), ``_fsdp_collectives.py`` (``foreach_all_gather``, ``foreach_reduce``) and
``_fsdp_state.py`` (``_root_post_backward_final_callback``).
"""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.fsdp2.host import host_memory
from memplan.memory.fsdp2.options import Fsdp2Options, InitDevice, StateDictType, Wrapping
from memplan.memory.fsdp2.units import (
    Unit,
    UnitFormats,
    cut_dimension,
    find_units,
    own_shape,
    own_states,
    shard_numel,
    tied_table,
)
from memplan.memory.programs.program import Program
from memplan.memory.programs.sharded import ShardedProgram
from memplan.memory.programs.stepping import stepped
from memplan.memory.programs.weights import Weight, is_trained
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.stops import Acts, Stops
from memplan.model.parameters import ModelPart
from memplan.training.choices import Offload
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks

if TYPE_CHECKING:
    from memplan.training.optimizers.script import Stepped

GATHER_STREAM, REDUCE_STREAM, REPLICA_STREAM = 1, 2, 3
_TAIL_HOOK = (0, 0)
_TIED = "the tied output matrix's own, until it is tied again"
_SHARDS = "the shards"
_SWAPPED = "the token table's own, until the tied output matrix's takes its place"
_BUFFERS, _GATHERED = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GATHERED_PARAMETERS


class UnitUse:
    """One unit's parameters: of a run of layers there are as many as layers."""

    __slots__ = (
        "all_gather", "copy", "done", "gathered", "gradient_shards", "gradients", "is_even", "unit", "whole",
    )  # fmt: skip

    def __init__(self, unit: Unit, copy: int) -> None:
        self.unit = unit
        self.copy = copy
        self.gathered: list[Block] = []
        """The whole parameters while they are there."""
        self.all_gather: Block | None = None
        """The flat result of an all-gather that is not copied out yet."""
        self.gradients: dict[Parameter, Block] = {}
        """Whole gradients of this backward pass, or of micro-batches that did not reduce."""
        self.whole: dict[Parameter, Block] = {}
        """Whole gradients of earlier micro-batches, in the format they are reduced in."""
        self.gradient_shards: Block | None = None
        self.done = False
        """Its backward pass is over."""
        self.is_even: bool | None = None
        """Every gradient is reduced in the format that it is computed in; None: nobody asked."""


class Fsdp2Program(ShardedProgram[UnitUse]):
    """One rank of ``fully_shard``."""

    def __init__(
        self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0, rank: int = 0
    ) -> None:
        self.options = Fsdp2Options.of(given.setup)
        self.offloaded = given.setup.offload_param is Offload.CPU
        self.formats = UnitFormats.of(given, self.options, offloaded=self.offloaded)
        units = find_units(given.tape, self.options, self.formats)
        super().__init__(given, ledger, units, UnitUse, workspace_bytes=workspace_bytes)
        self.place = rank // given.setup.tensor_parallel % self.formats.degree
        """Among the ranks over which the parameters are spread."""
        self.tail = self._single(self.units.tail)
        self.embedding = self._single(self.units.embedding)
        self.in_tail = False
        """The tail's backward pass has begun."""
        self.grouped = {
            id(table[index])
            for index in self.units.beside
            for table in (self.units.layers, self.units.beside)
        }
        """Units that are one of two groups of parameters of their module."""
        self.tells_ahead = bool(self.grouped) and self.options.wrapping is Wrapping.TORCHTITAN
        self.kept_all_gather: Block | None = None
        self.reduce_inputs: list[Block] = []
        self.ranks = Ranks(self.formats.degree, given.setup.tensor_parallel)
        """Over which the parameters are spread."""
        self.replicated = self.options.data_parallel_replicate_degree > 1
        self.all_reduced: list[Block] = []
        """Added up over the replicas and cast; held until the backward pass is over."""

    # -- loading and stepping --------------------------------------------------------------------

    def load(self) -> None:
        """Each unit whole before its shards; or tensor by tensor; or the shards as they are.

        (torch 2.13, ``FSDPParam._init_sharded_param``; accelerate 1.15, ``fsdp2_load_full_state_dict``, and
        torchtune 0.6, ``load_from_full_model_state_dict``; ``torch.nn.Module.to_empty``)
        """
        match self.options.init_device:
            case InitDevice.TO_EMPTY:
                self._load_empty()
            case InitDevice.META:
                self._load_whole()
            case InitDevice.CPU | InitDevice.CUDA:
                self._load_units()

    def _load_empty(self) -> None:
        """Shards and tables in the order of the modules; the output matrix's takes the place of a tied one.

        (A shard's parameter stays the same object, and ``swap_tensors`` gives it what was made last.)
        """
        tied = self._table
        loaded = self.load_in_order(
            lambda weight: self.load_shard(weight, name=_SWAPPED if weight == tied else None)
        )
        if tied is not None:
            self.load_shard(tied)
            self._free_shard(loaded.get(tied))

    def _load_whole(self) -> None:
        """Each tensor whole, then its shard; accelerate's state dict has a tied one under both names."""
        for weight in self.weights:
            self._cut(weight, name=weight)
        tied = None
        if self._table is not None and self.options.wrapping is Wrapping.ACCELERATE:
            tied = self._cut(self._table, name=_TIED)
        self.tables.load_all()
        self._free_shard(tied)

    @property
    def _table(self) -> Weight | None:
        """The token table, which a tied output matrix is; None: it is tied to none."""
        table = tied_table(self.given.tape)
        return None if table is None else (table, 0)

    def _cut(self, weight: Weight, *, name: object) -> Block | None:
        size = allocated_bytes(weight[0].numel, self.formats.kept_of(weight[0]))
        whole = self.ledger.allocate(size, 0, ComponentKind.PARAMETERS, name)
        shard = self.load_shard(weight, name=name)
        self.ledger.free(whole)
        return shard

    def _free_shard(self, shard: Block | None) -> None:
        if shard is not None:
            self.ledger.free(shard)

    def load_shard(self, weight: Weight, *, name: object = None) -> Block | None:
        """One weight's, where it is kept on the GPU."""
        if self.offloaded:
            return None
        size = self._shard_bytes(weight[0])
        return self.ledger.allocate(size, 0, ComponentKind.PARAMETERS, name or weight)

    def _load_units(self) -> None:
        """Layer by layer, the root last: moved to the GPU whole, then cut (``_init_sharded_param``)."""
        ledger = self.ledger
        cuda = self.options.init_device is InitDevice.CUDA
        uses = [*self._layer_uses(), *reversed(self.singles.values())]
        whole: dict[UnitUse, list[Block]] = {}
        if cuda:
            loaded = self._load_at_once()
            whole = {
                use: [loaded[parameter, use.copy] for parameter in use.unit.parameters]
                for use in uses
            }
        for use in uses:
            blocks = whole.get(use) or self._whole(use)
            if use is uses[-1] and not cuda:
                self.tables.load_all()
            for parameter in use.unit.parameters:
                self.load_shard((parameter, use.copy))
            # The call's list of parameters holds them all until it returns.
            for block in blocks:
                ledger.free(block)

    def _load_at_once(self) -> dict[Weight, Block]:
        """The model whole, before anything is cut."""

        def whole(weight: Weight) -> Block:
            size = allocated_bytes(weight[0].numel, self.formats.kept_of(weight[0]))
            return self.load_whole(weight, size, packs=True)

        return self.load_in_order(whole)

    def _whole(self, use: UnitUse) -> list[Block]:
        return [
            self.load_whole(
                (parameter, use.copy),
                allocated_bytes(parameter.numel, self.formats.kept_of(parameter)),
                packs=False,
            )
            for parameter in use.unit.parameters
        ]

    def _shard_bytes(self, parameter: Parameter) -> int:
        chunk = shard_numel(parameter, self.formats.degree_of(parameter))
        return allocated_bytes(chunk, self.formats.kept_of(parameter))

    def save(self) -> None:
        """A full checkpoint gathers tensor after tensor."""
        if self.formats.degree > 1 and self.options.state_dict_type is StateDictType.FULL:
            largest = max((unit.largest_bytes for unit in self.units.all()), default=0)
            self.ledger.use(largest, kind=_GATHERED, name="the largest tensor of a full checkpoint")

    def host_memory(self) -> HostMemory:
        """What is offloaded, and the model while it is loaded or saved."""
        return host_memory(
            self.given,
            self.units,
            own_states(self.units, self.formats, range(self.place, self.place + 1)),
            offloaded=self.offloaded,
            init_device=self.options.init_device,
            state_dict_type=self.options.state_dict_type,
            pinned=self.options.pin_memory,
        )

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """The last micro-batch reduces, or each does."""
        self.reduces = last or self.options.sync_each_batch
        super().micro_batch(step, first=first, last=last)

    def make_optimizer(self) -> None:
        """It is made of the shards, as some have their states from the beginning (``fully_shard`` is before it)."""
        if not self.offloaded:
            self.optimizer.construct(self._stepped_shards(), of=_SHARDS)

    def optimizer_step(self, *, first: bool) -> None:
        """States of this rank's own chunks, and what the update makes."""
        shards = self._stepped_shards()
        if self.offloaded:
            moved = self.optimizer.moved_bytes(shards)
            self.ledger.exchange(ExchangeKind.HOST_UPDATE, moved)
            return
        self.optimizer.step(shards, of=_SHARDS, first=first)

    def _stepped_shards(self) -> "list[Stepped]":
        """This rank's own chunks, without what shards are padded with."""
        formats = self.formats
        known: dict[Parameter, Stepped] = {}
        for parameter, _ in self.weights:
            if parameter not in known and is_trained(parameter):
                place = formats.place_of(parameter, self.place)
                shape = own_shape(parameter, formats.degree_of(parameter), place)
                known[parameter] = stepped(parameter, shape, formats.states_of(parameter))
        return [known[parameter] for parameter, _ in self.weights if parameter in known]

    def zero_grad(self) -> None:
        """A unit's shards are views of one tensor, which goes with the last of them."""
        for use in sorted(self._uses(), key=self._last_position):
            if use.gradient_shards is not None:
                self.ledger.free(use.gradient_shards)
                use.gradient_shards = None

    def _last_position(self, use: UnitUse) -> int:
        last = use.unit.parameters[-1]
        return self.positions[last, use.copy]

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

    def _reshard(self, use: UnitUse) -> None:
        self.ledger.free_all(use.gathered)
        use.gathered = []

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

    def _ranks_of(self, use: UnitUse) -> Ranks:
        """Over which a unit's parameters are spread."""
        apart = self.formats.degree // use.unit.degree
        return Ranks(use.unit.degree, self.ranks.stride * apart)

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

    def kept_numel(self, parameter: Parameter) -> int:
        """A chunk of each."""
        return shard_numel(parameter, self.formats.degree_of(parameter))

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
        """The tail's hook fires when the gradient of what it returns arrives."""
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

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:  # noqa: ARG002
        """The tail's backward pass begins, with the last of its modules."""
        if self.tail is not None and not self.in_tail:
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
        uses = self._uses_in(segment, repetition)
        if uses:
            given = segment.input
            if given is not None and given.requires_grad:
                for use in reversed(uses):
                    self._post_backward(use)
            return
        ends_tail = self.tail is not None and segment.part is ModelPart.NORM
        if ends_tail and self.tail is not None and not self.units.tied and not self.tail.done:
            self._post_backward(self.tail)

    def end_backward(self) -> None:
        """Units whose input needs no gradient, the root first, are reduced when all is over."""
        for use in self._uses():
            if not use.done:
                self._post_backward(use)
            if use.all_gather is not None:
                # Prefetched for a frozen unit that the backward pass never came to.
                self.ledger.free(use.all_gather)
                use.all_gather = None
        for block in self.reduce_inputs:
            self.ledger.free(block)
        self.reduce_inputs.clear()
        for block in self.all_reduced:
            self.ledger.free(block)
        self.all_reduced.clear()
        for use in self._uses():
            use.done = False
        self.in_tail = False
        self.order.clear()

    def _post_backward(self, use: UnitUse) -> None:
        """Reshard, then reduce the unit's gradients, or keep them for the last micro-batch."""
        use.done = True
        self._accumulate_whole(use)
        if self.reduces:
            self._match_shares(use)
        self._reshard(use)
        if self.reduces:
            self._reduce(use)

    def _reduce(self, use: UnitUse) -> None:
        """Lay the unit's gradients side by side and reduce them over its ranks."""
        unit, ledger = use.unit, self.ledger
        if id(unit) not in self.grouped or unit in self.units.beside.values():
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
        for block in reversed(blocks):
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

    def _accumulate_whole(self, use: UnitUse) -> None:
        """Under ``no_sync`` gradients are cast to the format they are reduced in, and added."""
        if not use.gradients or (self.reduces and not use.whole):
            return
        formats, ledger = self.formats, self.ledger
        if use.is_even is None:
            use.is_even = self._is_even(use.unit.parameters)
        if use.is_even or self._is_even(use.gradients):
            return
        for parameter, block in list(use.gradients.items()):
            if parameter not in use.whole:
                size = allocated_bytes(parameter.gradient_numel, formats.reduce_of(parameter))
                weight = parameter, use.copy
                use.whole[parameter] = ledger.allocate(size, 0, ComponentKind.GRADIENTS, weight)
            ledger.free(block)
        use.gradients.clear()

    def _is_even(self, parameters: Iterable[Parameter]) -> bool:
        formats = self.formats
        return all(formats.reduce_of(each) is formats.compute_of(each) for each in parameters)

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
