"""FSDP1's allocations (torch 2.13, torch/distributed/fsdp).

Four streams take part beside the main one: shards in the compute format are made on one
(``_pre_unshard_stream``), gathered on the next (``_unshard_stream``), where autograd also joins their
gradients, since the views of a flat parameter were made there; gradients are cast, padded and scattered
on a third (``_post_backward_stream``), and with replicas added up on a fourth (``_all_reduce_stream``).
The order is that of ``_init_utils.py`` (``_init_param_handle_from_module``), ``_flat_param.py``
(``shard``, ``init_flat_param_attributes``, ``pre_unshard``, ``unshard``) and ``_runtime_utils.py``
(``_pre_backward_hook``, ``_post_backward_hook``, ``_reduce_grad``).

FSDP1 marks blocks that another stream reads (``record_stream``): they are free at the first request after
that stream has come so far (``CUDACachingAllocator.cpp``, ``process_events``). Here that is the next
request, as if nothing ran late; ``limit_all_gathers`` bounds how far from it a run can be. It shows where
no request follows: behind the last unit's backward pass, and behind a step that asks for nothing.
"""

from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.module_names import module_depths
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.fsdp1.options import AutoWrap, Prefetch
from memplan.memory.fsdp1.units import FlatUnit, flat_places, own_states
from memplan.memory.fsdp1.wrapping import wrap
from memplan.memory.fsdp2.host import host_memory
from memplan.memory.fsdp2.options import InitDevice, StateDictType
from memplan.memory.fsdp2.units import ROOT, Unit
from memplan.memory.programs.sharded import FollowedUses, ShardedProgram
from memplan.memory.programs.weights import Weight, is_trained
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.spots import repeated_uses
from memplan.training.optimizers.script import Stepped
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks

SHARD_STREAM, GATHER_STREAM, REDUCE_STREAM, REPLICA_STREAM = 1, 2, 3, 4
_PARAMETERS, _GATHERED = ComponentKind.PARAMETERS, ComponentKind.GATHERED_PARAMETERS
_SHARDS = "the shards"
_BUFFERS, _GRADIENTS = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GRADIENTS
_FLAT = "flat shards"
_JOINED = "parameters being joined and sharded"
_WHOLE = "gathered parameters"
_PADDED = "gathered parameters, padded"
_SHARD = "shards to gather"
_REDUCED = "reduced gradients"
_CAST = "gradients to reduce"


class FlatUse:
    """One flat parameter."""

    __slots__ = (
        "awaits_backward", "copy", "done", "gathered", "gradient", "gradients", "is_lent", "prefetched",
        "shard_gradient", "unit",
    )  # fmt: skip

    def __init__(self, unit: Unit, copy: int) -> None:
        assert isinstance(unit, FlatUnit)
        self.unit: FlatUnit = unit
        self.copy = copy
        self.gathered: Block | None = None
        """The flat parameter, whole."""
        self.prefetched = False
        """Gathered, or only looked at, before its turn."""
        self.awaits_backward = False
        """Its backward pass has not begun (``_needs_pre_backward_unshard``)."""
        self.gradients: dict[Weight, Block] = {}
        """Of its views, in this backward pass."""
        self.gradient: Block | None = None
        """Those of micro-batches that did not reduce, joined; without sharding the reduced one."""
        self.shard_gradient: Block | None = None
        self.is_lent = False
        """What is reduced is the block that another stream has read."""
        self.done = False
        """Its backward pass is over."""


class Fsdp1Program(ShardedProgram[FlatUse]):
    """One rank of ``FullyShardedDataParallel``."""

    sum_stream = GATHER_STREAM

    def __init__(
        self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0, rank: int = 0
    ) -> None:
        wrapped = wrap(given)
        super().__init__(given, ledger, wrapped.units, FlatUse, workspace_bytes=workspace_bytes)
        self.options = wrapped.options
        self.formats = wrapped.formats
        self.place = rank % wrapped.formats.degree
        """Among the ranks over which the parameters are spread."""
        self.keeps_whole = wrapped.keeps_whole
        self.sharded = wrapped.formats.degree > 1
        self.ranks = Ranks(wrapped.formats.degree)
        """Over which the parameters are spread."""
        self.begun = False
        """The first forward pass has begun."""
        self.ran = False
        """It has ended: from then on it is known which unit comes next."""
        self.late: FlatUse | None = None
        """A layer whose backward pass is over, but whose gradients are not joined yet."""
        self.chain = FollowedUses((*self.singles.values(), *self._layer_uses()))
        """Uses in the order of their forward passes."""
        self.hooked: list[Block] = []
        """Inputs of frozen units that their hooks hold, and the gradients of these."""
        self.summed = repeated_uses(given.passes)
        """Weights whose gradient is a sum, which is made where the views were."""
        self.lent: list[Block] = []
        """Given back while another stream reads them: they are free at the next request."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Unit by unit, the root last: moved to the GPU, joined into a flat parameter, then cut."""
        ledger = self.ledger
        uses = [*self._layer_uses(), *self.singles.values()]
        whole: dict[FlatUse, list[Block]] = {}
        if self.options.init_device is InitDevice.CUDA:
            whole = {use: self._load_whole(use) for use in reversed(uses)}
            self.tables.load_all()
        for use in uses:
            parts = whole.get(use) or self._load_whole(use)
            if use is uses[-1] and not whole:
                self.tables.load_all()
            # Without sharding the joined parameters are what is kept.
            kind, name = (_GATHERED, _JOINED) if self.sharded else (_PARAMETERS, _FLAT)
            kept = flat = ledger.allocate(use.unit.whole_bytes, 0, kind, name)
            if self.sharded:
                kept = ledger.allocate(use.unit.shard_bytes, 0, _PARAMETERS, _FLAT)
                ledger.free(flat)
            if self.formats.offloaded:
                ledger.free(kept)
            for block in parts:
                ledger.free(block)

    def settle(self, *, num_micro_batches: int) -> None:
        """What the first forward pass makes, and gradients that stay."""
        self.train(0, num_micro_batches=num_micro_batches)

    def save(self) -> None:
        """A full checkpoint gathers the root for as long as it goes through the layers."""
        if self.options.state_dict_type is not StateDictType.FULL:
            return
        self._take_back()
        sizes = [self.units.root.whole_bytes]
        if self.options.wrapping is AutoWrap.LAYERS:
            layers = (unit.whole_bytes for unit in self.units.all() if unit.name != ROOT)
            sizes.append(max(layers, default=0))
        self.ledger.use(*sizes, kind=_GATHERED, name="whole units of a full checkpoint")

    def host_memory(self) -> HostMemory:
        """What is offloaded, and the model while it is loaded or saved."""
        kinds = own_states(self.units, self.formats)
        return host_memory(
            self.given,
            self.units,
            next(kind for kind in kinds if self.place in kind.places),
            offloaded=self.formats.offloaded,
            init_device=self.options.init_device,
            state_dict_type=self.options.state_dict_type,
            pinned=True,
        )

    def _load_whole(self, use: FlatUse) -> list[Block]:
        """Weights of outer modules first: a queue of modules (``_move_module_to_device``)."""
        formats = self.formats
        parameters = sorted(use.unit.parameters, key=module_depths(self.given.tape).__getitem__)
        return [
            self.load_whole(
                (parameter, use.copy),
                allocated_bytes(parameter.numel, formats.kept_of(parameter)),
                packs=self.options.init_device is InitDevice.CUDA,
            )
            for parameter in parameters
        ]

    def _begin(self) -> None:
        """What will be needed is made once and emptied at once (``init_flat_param_attributes``)."""
        self.begun = True
        for use in [*self.singles.values(), *self._layer_uses()]:
            unit, ledger = use.unit, self.ledger
            if unit.mixed:
                ledger.use(unit.compute_shard_bytes, kind=_BUFFERS, name=_SHARD)
            if self.sharded:
                ledger.use(unit.gathered_bytes, kind=_GATHERED, name=_WHOLE)
                if unit.mixed:
                    ledger.use(unit.padded_bytes, kind=_GATHERED, name=_PADDED)

    # -- gathering -------------------------------------------------------------------------------

    def _gather(self, use: FlatUse) -> None:
        """A shard in the compute format, the padded whole; then the shard's copy goes."""
        unit, ledger = use.unit, self.ledger
        if not unit.gathered_bytes:
            return
        if not self.sharded:
            if use.gathered is None:
                size = unit.gathered_bytes
                use.gathered = ledger.allocate(size, SHARD_STREAM, _GATHERED, _WHOLE)
            return
        there = use.gathered is not None
        if there and not self.formats.offloaded:
            return
        shard = None
        if unit.copy_in_bytes:
            shard = ledger.allocate(unit.copy_in_bytes, SHARD_STREAM, _BUFFERS, _SHARD)
        if unit.upload_bytes:
            name = "shards from the CPU"
            ledger.use(unit.upload_bytes, stream=SHARD_STREAM, kind=_BUFFERS, name=name)
        if self.formats.offloaded:
            ledger.exchange(ExchangeKind.TO_GPU, unit.shard_bytes, hiding=Hiding.AHEAD)
        ledger.exchange(ExchangeKind.COPY, unit.copy_in_bytes + unit.shard_bytes)
        if not there:
            ledger.exchange(ExchangeKind.ALL_GATHER, unit.gathered_bytes, self.ranks, Hiding.AHEAD)
            size = unit.gathered_bytes
            use.gathered = ledger.allocate(size, GATHER_STREAM, _GATHERED, _WHOLE)
        if shard is not None:
            ledger.free(shard)

    def _reshard(self, use: FlatUse, *, frees: bool) -> None:
        use.prefetched = False
        if use.gathered is not None and (frees or not self.sharded):
            self.ledger.free(use.gathered)
            use.gathered = None

    def _prefetch(self, use: FlatUse | None) -> None:
        if use is not None and not use.prefetched:
            use.prefetched = True
            self._gather(use)

    # -- forward ---------------------------------------------------------------------------------

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """The last micro-batch reduces, or each does."""
        self.reduces = last or self.options.sync_each_batch
        if not self.begun:
            self._begin()
        if first:
            self._drop_gradients()
        super().micro_batch(step, first=first, last=last)
        self.ran = True

    def forward_pass(self) -> None:
        """Its requests are the first after a step that asked for nothing."""
        self._take_back()
        super().forward_pass()

    def begin_pass(self) -> None:
        """So are those of a pass without gradients."""
        self._take_back()

    def _let_go(self, block: Block, *, is_lent: bool) -> None:
        """Give a block back, which another stream may have read; of fake tensors no stream does."""
        if is_lent and not self.given.tape.options.decomposed:
            self.lent.append(block)
        else:
            self.ledger.free(block)

    def _take_back(self) -> None:
        """Something is about to be requested: what other streams have read is free."""
        self.ledger.free_all(self.lent)
        self.lent.clear()

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Gather what the segment needs; the root comes first."""
        if segment is self.given.tape.segments[0] and not repetition and self.root is not None:
            self._pre_forward(self.root)
        for use in self._uses_in(segment, repetition):
            self._pre_forward(use)

    def _pre_forward(self, use: FlatUse) -> None:
        if not use.prefetched:
            self._gather(use)
        if self.options.forward_prefetch and self.ran:
            self._prefetch(self.chain.beside(use, 1))

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """Let the layer's parameters go.

        A reentrant checkpoint runs it without gradients first: then no hook for its backward pass is
        there yet (``_register_pre_backward_hooks``), and no other unit's gathers it ahead of its turn.
        """
        is_graded = not (self.options.reentrant_checkpointing and segment.checkpointed)
        for use in reversed(self._uses_in(segment, repetition)):
            self._reshard(use, frees=not self.keeps_whole)
            self._end_forward_of(use, is_graded=is_graded)

    def end_forward(self) -> None:
        """The root stays gathered."""
        if self.root is not None:
            self._reshard(self.root, frees=False)
            self._end_forward_of(self.root, is_graded=True)

    def _end_forward_of(self, use: FlatUse, *, is_graded: bool) -> None:
        self.order.append(use)
        use.awaits_backward = is_graded

    def end_pass(self) -> None:
        """Without a backward pass the root goes, and the order of this one is of no use."""
        if self.root is not None:
            self._reshard(self.root, frees=not self.keeps_whole)
        for use in self.order:
            use.awaits_backward = False
        self.order.clear()

    # -- backward --------------------------------------------------------------------------------

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """Gather what the segment needs."""
        self.reach_model(segment)
        if segment.output is not None and segment.output.requires_grad:
            for use in self._uses_in(segment, repetition):
                self._pre_backward(use)

    def _pre_backward(self, use: FlatUse) -> None:
        if not use.prefetched:
            self._gather(use)
        use.awaits_backward = False
        if self.options.backward_prefetch is Prefetch.PRE:
            self._prefetch_before(use)

    def _prefetch_before(self, use: FlatUse) -> None:
        """Gather the unit whose forward pass ended before this one's, unless it is done already."""
        before = self.order.beside(use, -1)
        if before is not None and before.awaits_backward:
            self._prefetch(before)

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """It waits for those of its flat parameter's other views."""
        self._use_of(weight).gradients[weight] = block

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """Reduce the layer's gradients, one layer late where forward gathered ahead.

        Then a layer's views were made before the layer below it ran, and autograd, which goes back in
        the order of making, joins their gradients after that layer's.
        """
        if self.options.reentrant_checkpointing and segment.checkpointed:
            self._hold_input(segment, repetition)
        for use in reversed(self._uses_in(segment, repetition)):
            if not (self.options.forward_prefetch and self.ran):
                self._post_backward(use)
                continue
            late, self.late = self.late, use
            if late is not None:
                self._post_backward(late)
        self._take_back()

    def _hold_input(self, segment: Segment, repetition: int) -> None:
        """What a frozen unit was given when its layer ran again, and the gradient of the one above.

        To reshard it, a hook stands on each of its inputs (``_register_post_backward_reshard_only_hook``),
        which keeps their graph nodes (torch/autograd/graph.py, ``register_multi_grad_hook``). In a
        reentrant checkpoint an input is a leaf: its node keeps it, and it keeps its gradient. The hooks
        are removed when the backward pass is over (``_finalize_params``).
        """
        layer = self._layer(segment, repetition)
        if layer is None or layer.unit.flat_gradient_bytes or segment.input is None:
            return
        size = segment.input.storage.num_bytes
        words = "inputs of frozen units, which their hooks keep"
        self.hooked.append(self.ledger.allocate(size, 0, ComponentKind.ACTIVATIONS, words))
        if len(self.hooked) > 1:
            words = "gradients of what hooks keep"
            self.hooked.append(self.ledger.allocate(size, 0, ComponentKind.TEMPORARIES, words))

    def end_backward(self) -> None:
        """The root's gradients are joined last; then offloaded ones let go."""
        late, self.late = self.late, None
        if late is not None:
            self._post_backward(late)
        for use in self._uses():
            if not use.done:
                self._post_backward(use)
        self.ledger.free_all(self.hooked)
        self.hooked.clear()
        for use in self._uses():
            use.done = use.prefetched = False
            if self.formats.offloaded and use.shard_gradient is not None:
                self._let_go(use.shard_gradient, is_lent=use.is_lent)
                use.shard_gradient = None
        self.order.clear()

    def _post_backward(self, use: FlatUse) -> None:
        """Join the gradients of the views; let the parameters go; reduce, or keep for later."""
        use.done = True
        unit, ledger = use.unit, self.ledger
        self._take_back()
        if not use.gradients:
            self._reshard(use, frees=self.reduces or not self.keeps_whole)
            return
        size, name = unit.flat_gradient_bytes, "gradients of a unit, joined"
        joined = ledger.allocate(size, GATHER_STREAM, _GRADIENTS, name)
        self._reshard(use, frees=self.reduces or not self.keeps_whole)
        for weight, block in use.gradients.items():
            # Autograd marks what it joins on another stream than that it was made on, sums are made on this one.
            self._let_go(block, is_lent=weight[0] not in self.summed)
        use.gradients.clear()
        added = None
        if use.gradient is None:
            use.gradient = joined
        else:
            added = joined
        if self.options.backward_prefetch is Prefetch.POST:
            self._take_back()
            self._prefetch_before(use)
        if not self.reduces:
            if added is None:
                self._show_gradients(use)
        elif self.sharded:
            self._take_back()
            self._reduce(use)
        else:
            self._reduce_whole(use, is_sum=added is not None)
        if added is not None:
            # Nine recorded runs: where whole gradients are reduced as they are, this one waits too.
            is_whole = self.reduces and not self.sharded
            self._let_go(added, is_lent=is_whole and use.is_lent)

    def _show_gradients(self, use: FlatUse) -> None:
        """Each original parameter gets a gradient as small as its shard, then a view of the whole."""
        if not self.options.use_orig_params or not self.sharded or self.formats.offloaded:
            return
        self._take_back()
        for _, _, numel in flat_places(use.unit, self.options, self.formats, self.place):
            if numel:
                size, name = allocated_bytes(numel, self.formats.kept), "gradients of shards"
                self.ledger.use(size, stream=GATHER_STREAM, kind=_GRADIENTS, name=name)

    def _reduce(self, use: FlatUse) -> None:
        """Cast, pad and scatter; then the shard is cast to the format it is kept in."""
        unit, ledger = use.unit, self.ledger
        copies = [
            ledger.allocate(size, REDUCE_STREAM, _BUFFERS, _CAST)
            for size in (unit.cast_gradient_bytes, unit.padded_gradient_bytes)
            if size
        ]
        size = unit.reduce_output_bytes
        sent = unit.padded_gradient_bytes or unit.cast_gradient_bytes or unit.flat_gradient_bytes
        ledger.exchange(ExchangeKind.REDUCE_SCATTER, sent, self.ranks, Hiding.BEHIND)
        copied = unit.cast_gradient_bytes + unit.padded_gradient_bytes
        ledger.exchange(ExchangeKind.COPY, 2 * copied)
        replicas = self.options.data_parallel_replicate_degree
        if replicas > 1:
            spread = Ranks(replicas, self.ranks.degree)
            ledger.exchange(ExchangeKind.ALL_REDUCE, size, spread, Hiding.BEHIND)
        if self.formats.offloaded:
            ledger.exchange(ExchangeKind.TO_HOST, unit.gradient_shard_bytes, hiding=Hiding.BEHIND)
        shard = ledger.allocate(size, REDUCE_STREAM, _GRADIENTS, _REDUCED)
        if unit.casts_reduced:
            stream = REPLICA_STREAM if replicas > 1 else REDUCE_STREAM
            cast = ledger.allocate(unit.gradient_shard_bytes, stream, _GRADIENTS, _REDUCED)
            self._let_go(shard, is_lent=replicas > 1)
            shard = cast
        is_lent = replicas > 1 and not unit.casts_reduced
        if use.shard_gradient is None:
            use.shard_gradient, use.is_lent = shard, is_lent
        else:
            self._let_go(shard, is_lent=is_lent)
        for block in reversed(copies):
            ledger.free(block)
        assert use.gradient is not None
        self._let_go(use.gradient, is_lent=True)
        use.gradient = None

    def _reduce_whole(self, use: FlatUse, *, is_sum: bool) -> None:
        """All-reduce in place; the result is cast to the format it is kept in.

        A sum with what an earlier micro-batch reduced has that format: it is cast there and back.
        """
        unit, ledger = use.unit, self.ledger
        sent = unit.cast_gradient_bytes or unit.flat_gradient_bytes
        ranks = Ranks(self.given.setup.gradient_ranks)
        ledger.exchange(ExchangeKind.ALL_REDUCE, sent, ranks, Hiding.BEHIND)
        found = self.formats.compute
        if is_sum and self.options.sync_each_batch:
            found = self.formats.kept
        assert use.gradient is not None
        # Each format's copy goes when the next one is there, the reduced gradient at the end.
        waiting = [use.gradient]
        if found is not self.formats.reduce:
            self._take_back()
            size = unit.cast_gradient_bytes or unit.flat_gradient_bytes
            waiting.append(ledger.allocate(size, REDUCE_STREAM, _BUFFERS, _CAST))
        if self.formats.reduce is not self.formats.kept:
            self._take_back()
            size = unit.gradient_shard_bytes
            cast = ledger.allocate(size, REDUCE_STREAM, _GRADIENTS, _REDUCED)
            if len(waiting) > 1:
                ledger.free(waiting.pop())
            waiting.append(cast)
        now = waiting.pop()
        for block in waiting:
            self._let_go(block, is_lent=True)
        use.gradient, use.is_lent = now, not waiting

    # -- the update ------------------------------------------------------------------------------

    def make_optimizer(self) -> None:
        """It is made of the shards, as some have their states from the beginning."""
        if not self.formats.offloaded:
            self.optimizer.construct(self._stepped_shards(), of=_SHARDS)

    def optimizer_step(self, *, first: bool) -> None:
        """States of what this rank holds, and what the update makes."""
        shards = self._stepped_shards()
        if self.formats.offloaded:
            moved = self.optimizer.moved_bytes(shards)
            self.ledger.exchange(ExchangeKind.HOST_UPDATE, moved)
        else:
            if self.optimizer.asks(shards, first=first):
                self._take_back()
            self.optimizer.step(shards, of=_SHARDS, first=first)

    def _stepped_shards(self) -> list[Stepped]:
        """Flat shards, or this rank's pieces of the original parameters."""
        adapters = [use.unit.parameters[0] for uses in self.beside.values() for use in uses[:1]]
        states = self.formats.states_of(adapters[0]) if adapters else self.formats.states
        return [Stepped((numel,), states) for numel in self._stepped()]

    def _stepped(self) -> list[int]:
        """Elements of each tensor that the optimizer is handed."""
        if not self.options.use_orig_params:
            return [use.unit.shard_numel for use in self._uses() if use.unit.flat_gradient_bytes]
        numels: dict[Weight, int] = {}
        for use in self._uses():
            places = flat_places(use.unit, self.options, self.formats, self.place)
            for parameter, copy, numel in places:
                numels[parameter, copy + use.copy] = numel
        return [
            numels[weight] for weight in self.weights if is_trained(weight[0]) and numels[weight]
        ]

    def zero_grad(self) -> None:
        """Flat gradients go; views of them do not let go of it before the next forward pass."""
        if not self.options.use_orig_params:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for use in self._uses():
            for block in (use.gradient, use.shard_gradient):
                if block is not None:
                    self._let_go(block, is_lent=use.is_lent)
            use.gradient = use.shard_gradient = None
