"""Layers: equal neighbours are recorded once and repeated by arithmetic."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.pruning import prune
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Site
from memplan.graph.modules.unread import UnreadSegments
from memplan.graph.stacks import checkpointed_layers
from memplan.model.parameters import ModelPart, beside_of


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Neighbours that are equal, and checkpointed and trained alike."""

    kind: Hashable
    start: int
    count: int
    checkpointed: bool
    frozen: bool


class LayerList(Module):
    """``torch.nn.ModuleList``, of which a module for each kind of layer is made.

    ``kinds`` says of every layer what sets it apart from the others; ``make`` builds one of a kind.
    """

    recomputes = True
    """Its layers are recomputed where a job checkpoints layers."""
    captured: frozenset[int] = frozenset()
    """Layers, counted from 1, whose results are handed out beside the last one's; 0: what the first is given."""
    is_read = True
    """Somebody reads what the last layer gives; else nothing behind the last captured one leads anywhere."""
    ends = False
    """Nothing reads what its last layer hands on beside hidden states, and it has no part in a gradient."""

    def __init__(
        self,
        segment: str,
        kinds: Sequence[Hashable],
        make: Callable[[Any], Module],
        *,
        shared: bool = False,
        streams: bool = False,
    ) -> None:
        self.before, self.depth = 0, len(kinds)
        """Layers of other lists that are counted before these, and layers in all lists."""
        self.shared = shared
        """Layers of a kind are one, which is called again (ALBERT)."""
        self.streams = streams
        """Each hands the next one more than hidden states, so that none stands for others."""
        self.segment_name = segment
        self.kinds: list[Any] = list(kinds)
        self.made = {kind: make(kind) for kind in dict.fromkeys(kinds)}
        self._states: dict[int, Handle] = {}
        for number, layer in enumerate(self.made.values()):
            setattr(self, str(number), layer)

    @property
    def spans_segments(self) -> bool:
        """Each layer is a segment."""
        return True

    def capture(self, *numbers: int, is_read: bool) -> list[int]:
        """Have states handed out: the first is what the first layer is given, -1 what the last gives
        (``output_hidden_states``). Returns the numbers of the layers that give them."""
        places = [number + (len(self.kinds) + 1) * (number < 0) for number in numbers]
        self.captured, self.is_read = frozenset(places), is_read
        return places

    def take_states(self) -> dict[int, Handle]:
        """What was captured, by the numbers of layers; they are named elsewhere from here on."""
        found, self._states = self._states, {}
        return found

    def seen(self, number: int, state: Handle) -> None:
        """Note what a layer gave, where it is captured."""
        if number in self.captured:
            self._states[number] = state
            if not self.is_read and number == max(self.captured):
                self.run.unread = UnreadSegments(self.run)

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """Layers have names of their own, which begin anew in each of them."""
        self.site, self.path, self.within = site, path, within
        owns = False
        for layer in self.made.values():
            owns |= layer.attach(site, path, "")
        return owns

    @property
    def beginning(self) -> str:
        """How names of modules in it begin in the whole class."""
        return f"{self.path}.{{}}."

    def runs(self) -> Iterator[LayerRun]:
        """Stretches of the list that are recorded once."""
        options, depth = self.run.options, len(self.kinds)
        again = options.checkpointed_layers if self.recomputes else 0.0
        recomputed = checkpointed_layers(again, self.depth)
        cuts: set[int] = set()
        for first, last in (*recomputed.ranges, *options.freeze.layer_ranges):
            cuts |= {first - self.before, last + 1 - self.before}
        if options.stage is not None:
            # What reads what was received, and what makes what is sent, stand apart.
            cuts |= set() if options.stage.is_first else {1}
            cuts |= set() if options.stage.is_last else {depth - 1}
        if options.adaptation is not None:
            cuts |= options.adaptation.cuts(self.segment_name)
        if options.trained is not None:
            cuts |= options.trained.cuts(self.segment_name)
        # The layer behind reads what others read too, and so has a gradient to add to.
        cuts |= self.captured | {number + 1 for number in self.captured}
        beside = beside_of(self.segment_name)
        frozen = self.is_frozen(ModelPart.LAYERS, self.segment_name.partition(".")[0])
        at = 0
        for kind, group in groupby(self.kinds):
            stop = at + len(list(group))
            inside = [] if self.shared else sorted(cut for cut in cuts if at < cut < stop)
            for low, high in pairwise([at, *inside, stop]):
                number = self.before + low
                own = frozen or (not beside and options.freeze.freezes_layer(number))
                yield LayerRun(kind, low, high - low, number in recomputed, own)
            at = stop

    def __iter__(self) -> "Iterator[Layer]":
        """Each layer that is recorded, as the class's own loop comes to it."""
        self.run.beginnings[self.segment_name] = self.beginning
        for stretch in self.runs():
            left = stretch.count
            first: Segment | None = None
            while left:
                once = 1 if self.shared or self.streams else left
                turn = Layer(self, stretch, once, first)
                yield turn
                segment = turn.segment  # others may have followed: what stands between two layers
                if self.shared:
                    first = first or segment
                left -= segment.repeat
                for storage in segment.given:
                    if storage not in segment.returned and self.run.is_named(storage):
                        self.run.outlive(storage)
        if self.ends:
            prune(self.run.segment)


def numbered(model: Module) -> list[LayerList]:
    """All lists of a model, whose layers are counted through them."""
    lists = [each for _, each in model.modules() if isinstance(each, LayerList)]
    before, total = 0, sum(len(each.kinds) for each in lists)
    for each in lists:
        each.before, each.depth = before, total
        before += len(each.kinds)
    return lists


class KeptLayers(LayerList):
    """Layers that transformers checkpoints in no job."""

    recomputes = False


class OneLayer(LayerList):
    """A layer that stands by itself, beside what is none."""

    def __init__(self, segment: str, layer: Module) -> None:
        super().__init__(segment, [0], lambda _: layer)

    @property
    def beginning(self) -> str:
        """It has no number here."""
        return f"{self.path}."

    def forward(self, x: Handle, *args: Any) -> Any:
        """Call it."""
        made: Any = x
        for layer in self:
            made = layer(x, *args)
        return made


def _cast(args: Any) -> Any:
    """What a layer is handed in the format that FSDP casts arguments to, before the layer begins."""
    if isinstance(args, tuple):
        return tuple(map(_cast, args))
    if not isinstance(args, Handle) or not args.dtype.is_floating or args.is_complex:
        return args
    run = args.run
    record = run.cast_argument(args.record, run.compute)
    return args if record is args.record else Handle(run, record, args.shape, args.strides)


class Layer:
    """One turn of the loop over layers: calling it is a segment."""

    __slots__ = ("_again", "_layers", "_left", "_module", "_name", "_number", "_stretch", "segment")

    def __init__(
        self, layers: LayerList, stretch: LayerRun, left: int, again: Segment | None
    ) -> None:
        self._module, self._stretch, self._left = layers.made[stretch.kind], stretch, left
        self._name, self._again, self._layers = layers.segment_name, again, layers
        self._number = layers.before + stretch.start
        self.segment: Segment
        """What the call wrote down."""

    @property
    def kind(self) -> Any:
        """What sets it apart from other layers."""
        return self._stretch.kind

    def __call__(self, x: Handle, *args: Any, unread: Handle | None = None) -> Any:
        """Run it once for all that are like it; of what it is handed it may leave something ``unread``, which a
        checkpoint keeps as all the rest.

        What it returns beside the hidden states the model holds until the next layer has returned.
        They are not where one gives another format than it is given, or the first trained one stands
        behind frozen ones.
        """
        run, stretch = self._module.run, self._stretch
        at = stretch.start + stretch.count - self._left
        if not at:
            self._layers.seen(0, x)
        streams = self._module.further
        given = [_likeness(each) for each in _records((x, *args[:streams]))]
        if run.options.casts_inputs and run.segment.output is None:
            # before the layer begins, whose recomputation reads the copy
            x, args = x.to(run.compute), (*_cast(args[:streams]), *args[streams:])
        beside = _records(args[:streams])
        run.start(
            self._name, x.record, part=ModelPart.LAYERS, repeat=self._left,
            checkpointed=stretch.checkpointed, frozen=stretch.frozen, again=self._again,
            further=beside,
        )  # fmt: skip
        self._describe()
        if unread is not None:
            run.be_handed(unread.record)
        if run.options.casts_inputs:
            args = _cast(args)
        returned = self._module(x, *args)
        made, *further = returned if isinstance(returned, tuple) else (returned,)
        handed_on = self._module.hands_on
        becomes = _records(further[:streams])
        beside = _records(further[streams + handed_on :])
        run.touch(*beside)
        run.finish(made.record, further=becomes)
        run.carry(*beside)
        if [_likeness(each) for each in (made.record, *becomes)] != given:
            run.segment.repeat = 1
        self._layers.seen(at + run.segment.repeat, made)
        return returned

    def pass_over(self, x: Handle) -> None:
        """Its weights are there, and nothing runs through them."""
        from memplan.graph.modules.basic import spare  # only where layers are left out

        run, stretch = self._module.run, self._stretch
        if run.segment.output is None:
            run.finish(x.record)
        run.outlive(x.record.storage)
        run.begin(self._name, part=ModelPart.LAYERS, repeat=self._left, frozen=stretch.frozen)
        self._describe()
        spare(self._module)
        run.end(run.tensor(0, DType.FP32))

    def _describe(self) -> None:
        """Note what its segment is."""
        run = self._module.run
        self.segment = run.segment
        described = run.layers.get(self._name.partition(".")[0])
        self.segment.layer = None if described is None else described[self._number]


def _records(handles: Sequence[Handle | None]) -> list[Tensor]:
    return [each.record for each in handles if each is not None]


def _likeness(tensor: Tensor) -> tuple[object, ...]:
    """What a layer's repetitions hand on alike."""
    return tensor.numel, tensor.dtype, tensor.requires_grad
