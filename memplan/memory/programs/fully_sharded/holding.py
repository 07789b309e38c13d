"""What a rank of FSDP2 holds: its shards, how they come onto the GPU, what the optimizer makes of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.fsdp2.host import host_memory
from memplan.memory.fsdp2.options import Fsdp2Options, InitDevice, StateDictType, Wrapping
from memplan.memory.fsdp2.units import (
    Unit,
    UnitFormats,
    find_units,
    own_shape,
    own_states,
    shard_numel,
    tied_table,
)
from memplan.memory.programs.sharded import ShardedProgram
from memplan.memory.programs.stepping import stepped
from memplan.memory.programs.weights import Weight, is_trained
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.choices import Offload
from memplan.training.splitting.exchange import ExchangeKind, Ranks

if TYPE_CHECKING:
    from memplan.training.optimizers.script import Stepped

_TIED = "the tied output matrix's own, until it is tied again"
_SHARDS = "the shards"
_SWAPPED = "the token table's own, until the tied output matrix's takes its place"


class UnitUse:
    """One unit's parameters: of a run of layers there are as many as layers."""

    __slots__ = (
        "all_gather", "copy", "done", "gathered", "gradient_shards", "gradients", "unit", "whole",
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


class HoldingShards(ShardedProgram[UnitUse]):
    """One rank of ``fully_shard``, between its passes."""

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
        beside = self.units.beside
        self.second = {id(unit) for unit in beside.values()}
        """Units that are the second of two groups of parameters of their module."""
        self.grouped = self.second | {id(self.units.layers[index]) for index in beside}
        """Those that are one of the two."""
        self.ranks = Ranks(self.formats.degree, given.setup.tensor_parallel)
        """Over which the parameters are spread."""

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
            self.ledger.use(
                largest,
                kind=ComponentKind.GATHERED_PARAMETERS,
                name="the largest tensor of a full checkpoint",
            )

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

    def make_optimizer(self) -> None:
        """It is made of the shards, as some have their states from the beginning (``fully_shard`` is before it)."""
        if not self.offloaded:
            self.optimizer.construct(self._own_shards(lambda each: each.requires_grad), of=_SHARDS)

    def optimizer_step(self, *, first: bool) -> None:
        """States of this rank's own chunks, and what the update makes."""
        shards = self._stepped_shards()
        if self.offloaded:
            moved = self.optimizer.moved_bytes(shards)
            self.ledger.exchange(ExchangeKind.HOST_UPDATE, moved)
            return
        self.optimizer.step(shards, of=_SHARDS, first=first)

    def _stepped_shards(self) -> "list[Stepped]":
        """Of what has a gradient."""
        return self._own_shards(is_trained)

    def _own_shards(self, wanted: Callable[[Parameter], bool]) -> "list[Stepped]":
        """This rank's own chunks, without what shards are padded with."""
        formats = self.formats
        known: dict[Parameter, Stepped] = {}
        for parameter, _ in self.weights:
            if parameter not in known and wanted(parameter):
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
        return max(self.positions[each, use.copy] for each in use.unit.parameters)

    def kept_numel(self, parameter: Parameter) -> int:
        """A chunk of each."""
        return shard_numel(parameter, self.formats.degree_of(parameter))

    def _ranks_of(self, use: UnitUse) -> Ranks:
        """Over which a unit's parameters are spread."""
        apart = self.formats.degree // use.unit.degree
        return Ranks(use.unit.degree, self.ranks.stride * apart)

    def _reshard(self, use: UnitUse) -> None:
        self.ledger.free_all(use.gathered)
        use.gathered = []
