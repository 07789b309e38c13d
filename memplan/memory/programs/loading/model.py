"""What a rank does before it trains: weights, buffers, and a running average of them.

``Loading`` is the plain way, a model that is built and moved to the GPU whole (``Module.to``); an engine
overrides what it does otherwise.
"""

from collections.abc import Callable
from typing import TypeVar

from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.memory.account import ComponentKind
from memplan.memory.engine_options import loads_by_device_map
from memplan.memory.programs.contracts import Player
from memplan.memory.programs.loading.tables import Tables
from memplan.memory.programs.weights import Weight, runs_of, weights_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.adapters import Lora
from memplan.units import round_up

LoadedT = TypeVar("LoadedT")
AVERAGE = "a copy of each weight"


class Loading:
    """A model that comes onto one rank whole."""

    playback: Player

    def __init__(self, given: RankInput, ledger: Ledger) -> None:
        self.given = given
        self.ledger = ledger
        self.weights: list[Weight] = [*weights_of(given.tape)]
        """In the order of ``named_parameters()``."""
        self.blocks: dict[Weight, Block] = {}
        """Of the weights, where they lie apart: an optimizer may move them."""
        self.tables = Tables(given.tape, ledger)

    def load(self) -> None:
        """Every weight, and each buffer where its module stands among them; then what peft works out."""
        cast = self._load()
        adapter = self.given.tape.options.adapter
        if isinstance(adapter, Lora) and adapter.dora:
            from memplan.memory.programs.loading.dora import measure_weights  # only for DoRA

            measure_weights(self.ledger, self.weights, self.playback)
        if cast:
            from memplan.memory.programs.loading.by_name import cast_adapters  # only then

            cast_adapters(self.ledger, self.blocks, cast)

    def _load(self) -> list[Weight]:
        """All of it; returned are weights of an adapter that are to be cast yet."""
        tables, options = self.tables, self.given.tape.options
        if options.quantization is not None:
            from memplan.memory.programs.loading.quantized import load_quantized  # only then

            self.blocks, cast = load_quantized(
                self.ledger, self.weights, tables, options,
                by_device_map=self.loads_by_device_map, places=tables.places,
            )  # fmt: skip
            return cast
        if self.loads_by_device_map:
            from memplan.memory.programs.loading.by_name import load_by_name  # only then

            self.blocks, cast = load_by_name(self.ledger, self.weights, tables)
            return cast
        for run in runs_of(self.given.tape):
            tables.load_each(run.before)
            blocks = self.ledger.allocate_all(run.sizes, ComponentKind.PARAMETERS)
            self.blocks.update(zip(run.weights, blocks, strict=True))
        return []

    def load_in_order(self, load: Callable[[Weight], LoadedT]) -> dict[Weight, LoadedT]:
        """Each weight as ``load`` brings it, and each buffer where its module stands among them (``Module.to``)."""
        found: dict[Weight, LoadedT] = {}
        for run in runs_of(self.given.tape):
            self.tables.load_each(run.before)
            for weight in run.weights:
                found[weight] = load(weight)
        return found

    @property
    def loads_by_device_map(self) -> bool:
        """Whether transformers loads the weights right onto this GPU."""
        return loads_by_device_map(self.given.setup)

    def load_model(self) -> dict[Weight, Block]:
        """Every weight, whole, and each buffer where its module stands among them (``Module.to``)."""
        options = self.given.tape.options
        if options.quantization is not None:
            from memplan.memory.programs.loading.quantized import load_quantized  # only then

            self.blocks, cast = load_quantized(
                self.ledger, self.weights, self.tables, options,
                by_device_map=self.loads_by_device_map, places={},
            )  # fmt: skip
            self.tables.load_all()
        else:
            cast = self._load()
        if cast:
            from memplan.memory.programs.loading.by_name import cast_adapters  # only then

            cast_adapters(self.ledger, self.blocks, cast)
        loaded, self.blocks = self.blocks, {}
        return loaded

    def load_average(self) -> None:
        """A running average of what this rank keeps of each weight, as ``AveragedModel`` copies it."""
        num_bytes = self.given.beside.averaged_bytes
        if num_bytes:
            self.ledger.allocate_all(
                [
                    (round_up(self.kept_numel(parameter) * num_bytes, ALLOCATION_ROUNDING), AVERAGE)
                    for parameter, _ in self.weights
                ],
                ComponentKind.AVERAGED_WEIGHTS,
            )

    def kept_numel(self, parameter: Parameter) -> int:
        """Elements of a weight that this rank keeps between steps."""
        return parameter.numel
