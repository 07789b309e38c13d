"""Operations and the segments they stand in: what the tape is made of, and what walks read."""

from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import PRODUCTS, SECOND_FIRST, OperationKind
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.model.parameters import ModelPart, beside_of
from memplan.training.compilation import Compilation
from memplan.training.splitting.exchange import NO_SENDS, Sends

if TYPE_CHECKING:
    from memplan.graph.core.away import Away, Handed
    from memplan.model.layers import LayerSpec


class Gradient(IntEnum):
    """How one input's gradient comes out of an operation.

    A positive number of the same field means: a temporary of that many bytes is made first and then
    summed down to the input's size (broadcast inputs).
    """

    SUMMED = -4
    """The output's gradient summed over its rows, by the engine once the formula has returned."""
    NONE = -2
    FUSED = -8
    """Written into the main gradients by the product itself: autograd is handed none of its own."""
    ALIAS = -1
    """The output's gradient itself, or a view of it."""
    SEEN = -9
    """The output's gradient in another shape: a view that holds the whole of it, so that the engine adds
    nothing to it in place (torch 2.13, ``as_view`` keeps its base; ``can_accumulate_inplace``)."""
    COLUMNS = -10
    """The same, of columns that lie one after another: what sums it over its rows reads along them."""
    TURNED = -11
    """A new tensor whose elements lie in another order than the parameter's, which is given a copy
    (torch 2.13, autograd/functions/accumulate_grad.h, ``obeys_layout_contract``)."""
    FRESH = 0
    """A new tensor of the input's size."""

    SAVED = -3
    """A storage the operation kept in forward, handed over as it is; in the order of ``saved``."""
    VIEW = -5
    """A new tensor seen through a view, as a product of matrices makes them: the engine adds nothing
    to it in place (torch 2.13, autograd/input_buffer.cpp, ``can_accumulate_inplace``)."""
    WHOLE = -7
    """A new tensor of the size that a split weight has on all ranks together."""
    REUSED = -6
    """In a compiled region: what a fused kernel writes, over the output's gradient where nothing else
    reads that and it is as large."""


NOT_HANDED = (Gradient.NONE, Gradient.FUSED)
"""What autograd has no tensor of."""
RESULT = 0
"""Where an operation makes its results among its temporaries."""


Change = tuple[object, int]
"""A block's key, and its bytes as it comes or, negative, as it goes."""


def scratch_changes(scratch: Sequence[int]) -> list[list[Change]]:
    """A kernel's temporaries as they come and go: before its first result, behind it, and so on.

    >>> before, after = scratch_changes((512, RESULT, 1024))
    >>> [size for _, size in before], [size for _, size in after]
    ([512], [1024, -1024, -512])
    """
    stages: list[list[Change]] = [[]]
    if RESULT not in scratch:
        stages.append([])
    blocks: list[Change] = []
    there: list[int] = []
    for step in scratch:
        if step == RESULT:
            stages.append([])
            blocks.append((RESULT, 0))
        elif step > 0:
            there.append(len(blocks))
            blocks.append((object(), step))
            stages[-1].append(blocks[-1])
        else:
            there.remove(~step)
            key, size = blocks[~step]
            blocks.append((key, 0))
            stages[-1].append((key, -size))
    for index in reversed(there):
        key, size = blocks[index]
        stages[-1].append((key, -size))
    return stages


class Operation:
    """One recorded operation."""

    __slots__ = (
        "backward_scratch",
        "flops",
        "forward_scratch",
        "gradients",
        "handed",
        "in_python",
        "inputs",
        "keeps",
        "keeps_weight",
        "kind",
        "multiplies",
        "outputs",
        "outside",
        "pinned",
        "saved",
        "saves_output",
        "sends",
        "tiles",
        "turns",
    )

    def __init__(
        self,
        kind: OperationKind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        saved: Sequence[Storage],
        gradients: Sequence[int],
        *,
        forward_scratch: Sequence[int] = (),
        backward_scratch: Sequence[int] = (),
        flops: int = 0,
        keeps_weight: bool = False,
        saves_output: bool = False,
        in_python: bool = False,
        pinned: Sequence[Storage] = (),
        outside: Sequence[Storage] = (),
        handed: "Handed" = (),
        tiles: "Tiles | None" = None,
        sends: Sends = NO_SENDS,
    ) -> None:
        self.kind = kind
        self.multiplies = kind in _MULTIPLYING
        """Whether it is a product of matrices that cuBLAS computes, or holds some that are only counted."""
        self.inputs = inputs
        self.outputs = outputs
        self.saved = saved
        """Storages kept for backward; empty where nothing requires a gradient."""
        self.gradients = gradients
        """For each input, a ``Gradient`` or the bytes of a temporary; empty without autograd."""
        self.forward_scratch = forward_scratch
        """Blocks of temporaries, in the order the kernel asks for them: a positive number is a block's
        bytes, ``~n`` frees what step n asked for, and ``RESULT`` is where the outputs are made: before all
        others unless it is there. What is left in the end goes in the opposite order."""
        self.backward_scratch = backward_scratch
        """The same in the backward formula, whose results are the gradients: one at each ``RESULT``, and
        all that are left at the last."""
        self.flops = flops
        self.keeps_weight = keeps_weight
        """It keeps a weight or buffer for backward, which is there anyway and not in ``saved``."""
        self.keeps = bool(gradients and (saved or keeps_weight))
        """It keeps anything for its backward formula, be it a weight."""
        self.saves_output = saves_output or in_python
        """One of its own outputs is kept, or whatever it keeps is kept when it has run: recomputation
        must run it to get there."""
        self.in_python = in_python
        """It is an ``autograd.Function``, whose formula goes by the order of its inputs."""
        self.pinned = pinned
        """Storages that its context holds by itself, past ``save_for_backward``: no checkpointing drops
        them, and they go with the graph, when backward is over."""
        self.outside = outside
        """Storages of earlier segments that it keeps, the segment's own input left out."""
        self.handed = handed
        """What hooks took of all that it keeps; what went is not in ``saved``."""
        self.tiles = tiles
        """What it runs tile by tile, where it is no operation but a stretch of them."""
        self.turns = 1
        """How often it is run, where it is one turn of a loop that stands for many."""
        self.sends = sends
        """What ranks send one another inside it; a collective of its own sends what it is given."""

    def forget(self) -> None:
        """Take back all that it keeps: nothing that it leads to is ever differentiated."""
        self.gradients, self.saved, self.pinned, self.handed = (), (), (), ()
        self.outside = ()
        self.keeps = self.keeps_weight = self.saves_output = False

    @property
    def held(self) -> Sequence[Storage]:
        """All that it keeps alive, however it does."""
        return (*self.saved, *self.pinned) if self.pinned else self.saved

    @property
    def name(self) -> str:
        """What people and snapshots call it; no rule hangs on it."""
        return str(self.kind)

    def backward_order(self) -> list[tuple[Tensor, int]]:
        """Each input with its gradient, in the order the backward formula computes them.

        Autograd's generated formulas go by the names of their arguments (tools/autograd,
        gen_autograd_functions.py): ``mat2`` and ``other`` come before ``self``.
        """
        pairs = list(zip(self.inputs, self.gradients, strict=True))
        if self.kind in SECOND_FIRST and not self.in_python:
            # What has no gradient (the offsets of a grouped product) stands behind.
            operands = [pair for pair in pairs if pair[1] not in NOT_HANDED]
            if len(operands) == 2:
                return operands[::-1]
        return pairs


_MULTIPLYING = PRODUCTS | {OperationKind.COUNTED}
BUFFER_WORDS = "tables beside the weights"


@dataclass(frozen=True, slots=True)
class Buffer:
    """What a module holds beside its parameters, in each of its segment's repetitions."""

    segment: "Segment"
    position: int
    """How many of the segment's parameters are declared before it."""
    numel: int
    """As it is loaded; 0: it is not."""
    dtype: DType
    words: str = BUFFER_WORDS
    before: str = ""
    """The module whose weights it comes before, of the segment or, where that has none of the name, of the
    model: those of its own module's children do, and the whole model's children."""
    behind: bool = False
    """Its module stands behind all others of the model, wherever it runs."""
    module: str = ""
    """Its own module, where all weights of the segment are declared before any runs: it stands behind that one's."""
    made_bytes: int = 0
    """What takes its place when its segment first runs, in another format or longer; 0: it stays as it is."""

    @property
    def num_bytes(self) -> int:
        """As it is loaded; 0: it is not."""
        return allocated_bytes(self.numel, self.dtype) if self.numel else 0

    @property
    def is_registered(self) -> bool:
        """Whether it is one of torch's buffers, which engines send and cast."""
        return self.words == BUFFER_WORDS and self.numel > 0

    @property
    def kept_bytes(self) -> int:
        """Once its segment has run."""
        return self.made_bytes or self.num_bytes


class SegmentComponent(StrEnum):
    """Which component of an account a segment's tensors belong to."""

    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of a segment that is computed again on its own in backward."""

    start: int
    stop: int
    """One past its last operation."""
    dropped: frozenset[Storage]
    """What only the region's own backward pass needs."""
    given: tuple[Storage, ...] = ()
    """What it is run again from, kept until its backward pass is over."""
    result: Tensor | None = None
    """Of one that is a backward pass within the backward pass, temporaries and all (Megatron's
    ``CheckpointFunction``): what it returns, which stays until that is over, and the gradient of it."""
    copied: tuple[Storage, ...] = ()
    """What others read of it: filled from a second copy, which its own backward pass holds to its end
    (Megatron's ``CheckpointWithoutOutput``)."""
    rerun: int | None = None
    """One past the last operation that really runs again; None: all do. Those after it only read what
    was dropped."""


class Tiles:
    """What one operation runs, a tile at a time (``memplan.graph.tiles``)."""

    __slots__ = ("backward", "count", "forward", "forward_gradients", "joined", "segment")

    def __init__(
        self, segment: "Segment", count: int, *, joined: bool, forward_gradients: bool
    ) -> None:
        self.segment = segment
        """The operations of one tile, from its input to its output."""
        self.count = count
        self.joined = joined
        """The tiles' outputs wait for one another and are joined; else they are numbers, added up."""
        self.forward_gradients = forward_gradients
        """Each tile's backward pass runs in the forward pass."""
        self.forward: Sequence[Sequence[Change]] = ()
        """What comes and goes before the results of the forward pass are there, and behind them, once
        ``memplan.memory.walks.tiled_walk`` has found it."""
        self.backward: Sequence[Sequence[Change]] = ()
        """The same around each gradient of the backward pass."""

    @property
    def runs_again(self) -> bool:
        """Whether the backward pass runs each tile a second time."""
        return not self.forward_gradients


class Segment:
    """A stretch of operations: the embedding, one layer of a run, the head."""

    __slots__ = (
        "beside", "carried", "checkpointed", "compiled", "entered", "external_reads", "external_saves",
        "further_inputs", "further_outputs", "graph_held", "handed_in", "index", "input", "input_away", "input_let_go", "kept_outputs", "layer", "left", "lingering", "logits", "name",
        "nested", "operations", "output", "parameters", "part", "reads", "regions", "released", "releases", "repeat", "sealed",
        "spans", "tied", "unhooked", "unmade",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        index: int,
        *,
        repeat: int,
        checkpointed: bool,
        part: ModelPart = ModelPart.OTHER,
    ) -> None:
        self.name = name
        """What people read; no rule hangs on it."""
        self.part = part
        """What it is to the model."""
        self.layer: LayerSpec | None = None
        """The layer that it writes down, where it is one of a stack's."""
        self.beside = beside_of(name)
        """The tower or projector that it is of, beside a language model."""
        self.index = index
        self.repeat = repeat
        """How many times the segment is run, each time with parameters of its own."""
        self.checkpointed = checkpointed
        """Its activations are dropped after the forward pass and computed again in backward."""
        self.nested = False
        """Where it is checkpointed: all of it is run again, and its own backward pass runs within the
        backward pass, so that what it was given, what it returns and the gradient of that stay until it
        is over (``torch.autograd.backward`` in Megatron's ``CheckpointFunction``)."""
        self.compiled = Compilation.NONE
        """Its operations are torch.compile's: fused, and their gradients handed over together."""
        self.operations: list[Operation] = []
        self.parameters: list[Parameter] = []
        self.input: Tensor | None = None
        self.logits: Storage | None = None
        """Of a part of the head behind another: its input, which counts as the head's all along."""
        self.output: Tensor | None = None
        self.further_inputs: tuple[Tensor, ...] = ()
        """Streams that it is given beside its input, and that nothing but it reads: a prompt's."""
        self.further_outputs: tuple[Tensor, ...] = ()
        """What becomes of them: the next repetition's further inputs, in their order."""
        self.handed_in: frozenset[Storage] = frozenset()
        """What an engine makes of its arguments before it begins: kept, and never computed again."""
        self.external_reads: list[Storage] = []
        """Storages of earlier segments that this one reads, the input left out."""
        self.external_saves: list[Storage] = []
        """Those of them that its operations keep for backward."""
        self.releases: list[Storage] = []
        """Storages of earlier segments that are let go when this one ends."""
        self.released: dict[Storage, int] = {}
        """Of those the ones that go before, and the operation behind which each does."""
        self.carried: tuple[Storage, ...] = ()
        """What the model holds of one repetition until the next one ends, kept or not."""
        self.lingering: list[Tensor] = []
        """What variables hold until the segment ends."""
        self.tied: list[tuple[str, Parameter]] = []
        """Modules of this segment, and the weights of others that they own too."""
        self.entered: list[tuple[int, str]] = []
        """Modules without parameters of their own, and the operation before which each is called;
        those whose name is the beginning of a parameter's are known from that."""
        self.left: list[tuple[int, str]] = []
        """Such modules, and the operation before which each returns what a gradient will reach."""
        self.reads: list[tuple[int, str, str]] = []
        """Weights that a module reads of others inside it by itself, without calling these: the operation before
        which it does, its name and the weight's."""
        self.spans: list[tuple[int, int, str]] = []
        """Modules with parameters of their own: their first operation, the one behind their last, and their name."""
        self.sealed: set[str] = set()
        """Modules on which DeepSpeed hangs its hooks as a whole: none on those inside."""
        self.unhooked: set[str] = set()
        """Modules all of whose arguments are given by name: no hook stands behind their backward pass."""
        self.unmade: set[str] = set()
        """Beginnings of parameters' names that no module bears: what they hold is the layer's."""
        self.regions: list[Region] = []
        """Stretches that are recomputed on their own."""
        self.graph_held: tuple[Storage, ...] = ()
        """In a checkpointed segment, what its second run keeps until backward is over: the model holds
        some of its outputs, and with them the graph that made them."""
        self.kept_outputs: frozenset[Storage] = frozenset()
        """In a checkpointed segment, what its policy keeps all the same."""
        self.input_let_go: int | None = None
        """The operation behind which the model's variable names something else than its input; None: the
        input stays to the end."""
        self.input_away: Away | None = None
        """Where a checkpointed segment's input lies until it runs again, if it goes."""

    @property
    def given(self) -> tuple[Storage, ...]:
        """What it is handed by the one before: its input and what comes beside that."""
        streams = self.further_inputs
        return tuple(each.storage for each in (self.input, *streams) if each is not None)

    @property
    def returned(self) -> tuple[Storage, ...]:
        """What it hands on."""
        streams = self.further_outputs
        return tuple(each.storage for each in (self.output, *streams) if each is not None)

    @property
    def streams(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Further inputs and what they become."""
        return zip(self.further_inputs, self.further_outputs, strict=False)

    def becomes(self, given: Storage) -> Tensor | None:
        """What a further input becomes; None where nothing of it goes on."""
        found = (after for before, after in self.streams if before.storage is given)
        return next(found, None)

    @property
    def keeps_input(self) -> bool:
        """Its input stays until it is computed again."""
        return self.checkpointed and self.input_away is None

    @property
    def pinned(self) -> frozenset[Storage]:
        """What its operations' contexts hold by themselves."""
        return frozenset(storage for each in self.operations for storage in each.pinned)

    @property
    def is_layer(self) -> bool:
        """It is one module of its own: a layer of a stack."""
        return self.part is ModelPart.LAYERS

    @property
    def component(self) -> SegmentComponent:
        """What its tensors count as."""
        if self.part is ModelPart.HEAD:
            return SegmentComponent.LOGITS_AND_LOSS
        return SegmentComponent.ACTIVATIONS

    @property
    def num_copies(self) -> int:
        """How many sets of its parameters the model owns."""
        return self.repeat
