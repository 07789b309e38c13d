"""What a tape is made of, as it is written down: segments, tensors, operations and what they keep."""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Buffer, Operation, Segment, Tiles
from memplan.graph.core.selecting import is_shared_out, selection_scratch
from memplan.graph.core.sorting import SortScratch, sorted_as
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.model.parameters import LayerBlock, ModelPart, beside_of
from memplan.training.choices_of_kernels.flash_splits import FlashGrid, num_flash_splits
from memplan.training.choices_of_kernels.sdpa import (
    ScoreKernel,
    SdpaCall,
    choose_sdpa_kernel,
    sdpa_way,
)
from memplan.training.splitting.exchange import NO_SENDS, Sends

if TYPE_CHECKING:
    from memplan.graph.core.away import Handed, Hooks


class Recording:
    """Operations as they are noted, segment by segment."""

    def __init__(self, options: TapeOptions, *, source: str = "model") -> None:
        self.options = options
        self.source = source
        """Where the model was read, for messages."""
        self.autocast = options.autocast
        self.compute = options.compute
        self.buffer_dtype = options.weights if options.casts_inputs else options.compute
        """Of tables beside the weights: an engine that casts weights as it gathers them leaves those as they are."""
        self.kernels = options.kernels
        self.decomposed = options.decomposed
        self.frozen = options.without_gradients and not options.of_trained
        """Parameters declared from here on are not trained."""
        self.trained_leaves: set[Parameter] = set()
        """Of a pass without gradients, weights that are trained in others: autocast keeps their copies
        (aten/src/ATen/autocast_mode.cpp, ``cached_cast``, asks whether they are leaves that want one)."""
        self.hooks: Hooks | None = None
        """What takes tensors that operations keep to CPU RAM."""
        if options.offload.hooks:
            from memplan.graph.core.away import hooks_of  # only then

            self.hooks = hooks_of(options.offload, weights_stay=options.weights_stay)
        self.adaptation = options.adaptation
        """The adapter in whose place the model's own weights are frozen."""
        self.adapted: Mapping[str, int] = {}
        """Modules of the present segment that are adapted, and the rank of each."""
        self._repetition = 0
        """How often segments of the present one's name were repeated before."""
        self._again: Segment | None = None
        self.block = LayerBlock.NETWORK
        """The block of a layer that is being written down."""
        self.segments: list[Segment] = []
        self.segment = Segment("", 0, repeat=1, checkpointed=False)
        self.inputs: list[int] = []
        """What the batch itself holds, tensor by tensor: token ids, labels and whatever else [bytes]."""
        self.declared: tuple[tuple[str, ...], ...] = ()
        """The order in which the class declares its parameters: the name of a segment, then modules
        of it or single parameters, for each stretch; empty: not known."""
        self.places: dict[int, int] = {}
        """Where constructors come to a parameter, by its identity; empty: they are not known."""
        self.beginnings: dict[str, str] = {}
        """How modules' names in the class begin, by the name of their segment, where the class itself says."""
        self.sdpa_calls: dict[SdpaCall, ScoreKernel] = {}
        """What torch's dispatcher was asked, and the kernel it took."""
        self.flash_grids: dict[FlashGrid, int] = {}
        """How flash attention was launched, and over how many thread blocks the keys are shared."""
        self.asked_generation = False
        """Something on it depends on whether the card is of Ampere's generation or a later one."""
        self.asked_multiprocessors = False
        self.asked_grouped = False
        """Something on it depends on what the card's grouped products work in."""
        self.walked: dict[Hashable, Any] = {}
        """What was found of segments that tapes of several cards share (``memplan.memory.walks.walked_before``)."""
        self.sorts: dict[tuple[int, int], SortScratch] = {}
        """What was sorted: how many pairs, their largest key, and what that takes [bytes]."""
        self.few_rows: dict[int, bool] = {}
        """Tables whose gradients go by the card: whether it sums up so many rows at once."""
        """Something on it depends on how many multiprocessors the card has."""
        self.buffers: list[Buffer] = []
        """What lies beside the parameters."""
        self.buffers_in_use: tuple[int, ...] = ()
        """Sizes to which Megatron's global memory buffer grows in the first pass, one after another."""
        self.returned: list[Tensor] = []
        """What the model returns beside the loss: logits."""
        self.outputs: Storage | None = None
        """What of it the loop holds, where it does: logits, or their copy in fp32."""
        self.loss_apart = False
        """torch.compile breaks its graph before the loss."""
        self.compiled_before: int | None = None
        """The segment before which the model returns, and the trainer goes on without torch.compile."""
        self.leaves: list[Tensor] = []
        """Activations that require a gradient without being computed from any parameter."""
        self._casts: dict[Parameter, Tensor] = {}
        self._touches = 0
        self.returned_at: int | None = None
        """The segment before which the model has returned; None: with the last one."""
        self.joined_at: int | None = None
        """The segment before which passes of other models run, whose results it takes."""
        self.cached: list[tuple[Tensor, Segment]] = []
        """Keys and values that the outputs hold, with the segment each repetition of which does."""

    @property
    def outputs_bytes(self) -> int:
        """What the loop holds of what the model returns [bytes]."""
        return 0 if self.outputs is None else self.outputs.num_bytes

    @property
    def num_multiprocessors(self) -> int:
        """Of the card, where kernels go by it."""
        self.asked_multiprocessors = True
        return self.options.multiprocessors

    @property
    def grouped_workspace_bytes(self) -> int:
        """What the card's kernel of grouped products works in; 0: it has none."""
        self.asked_grouped = True
        return self.options.grouped_workspace_bytes

    def flash_splits(self, grid: FlashGrid) -> int:
        """Over how many thread blocks the card shares a query's keys."""
        found = self.flash_grids[grid] = num_flash_splits(grid, self.options.multiprocessors)
        return found

    def sort_scratch_bytes(self, count: int, *, largest_key: int) -> int:
        """What a sort of so many pairs asks for [bytes]."""
        found = self.sorts[count, largest_key] = SortScratch.of(
            count, largest_key=largest_key, tile=self.options.sort_tile
        )
        return found

    def selection_scratch(self, rows: int, x: Tensor) -> tuple[int, ...]:
        """What finding the largest of each row asks for behind its results [bytes]; nothing where one block does."""
        width = x.numel // rows
        if not is_shared_out(rows, width):
            return ()
        return selection_scratch(rows, width, x.dtype.num_bytes, self.num_multiprocessors)

    def has_few_rows(self, num_rows: int) -> bool:
        """Whether the card sums up the gradient of a table with so many rows at once."""
        found = self.few_rows[num_rows] = _are_few(num_rows, self.options)
        return found

    @property
    def is_ampere(self) -> bool:
        """Whether the card is of that generation or a later one, where a package asks."""
        self.asked_generation = True
        return self.options.is_ampere

    def runs_alike_on(self, options: TapeOptions) -> bool:
        """Whether kernels that go by the card itself do there as they do on this one."""
        return self._runs_same_kernels_on(options) and self._sorts_alike_on(options)

    def _runs_same_kernels_on(self, options: TapeOptions) -> bool:
        """Whether there is nothing but sorts that asks for other temporaries there."""
        if self.asked_generation and options.is_ampere is not self.options.is_ampere:
            return False
        workspace_bytes = self.options.grouped_workspace_bytes
        if self.asked_grouped and options.grouped_workspace_bytes != workspace_bytes:
            return False
        if self.asked_multiprocessors and options.multiprocessors != self.options.multiprocessors:
            return False
        if any(_are_few(num_rows, options) is not few for num_rows, few in self.few_rows.items()):
            return False
        return all(
            num_flash_splits(grid, options.multiprocessors) == splits
            for grid, splits in self.flash_grids.items()
        )

    def _sorts_alike_on(self, options: TapeOptions) -> bool:
        return all(each.on(options.sort_tile) == each for each in self.sorts.values())

    def as_on(self, options: TapeOptions) -> Self | None:
        """The same operations with the options of another card; None where that runs others."""
        if options.is_tiled:
            return None
        for call in self.sdpa_calls:
            if sdpa_way(call, options.sdpa) != sdpa_way(call, self.options.sdpa):
                return None
        if not self._runs_same_kernels_on(options):
            return None
        made = copy(self)
        made.options = options
        if not self._sorts_alike_on(options):
            made._sort_as_on(options.sort_tile)
        return made

    def _sort_as_on(self, tile: int) -> None:
        """Exchange the segments that sort for ones that do it in a card's way."""
        changed = {each: _sorted_segment(each, tile) for each in self.segments}
        self.sorts = {of: each.on(tile) for of, each in self.sorts.items()}
        self.segments = [changed[each] for each in self.segments]
        self.buffers = [replace(each, segment=changed[each.segment]) for each in self.buffers]

    def begin(
        self,
        name: str,
        *,
        part: ModelPart = ModelPart.OTHER,
        repeat: int = 1,
        checkpointed: bool = False,
        frozen: bool = False,
        again: Segment | None = None,
        x: Tensor | None = None,
        further: Sequence[Tensor] = (),
    ) -> None:
        """Start a segment that reads ``x``, the output of the one before, and ``further`` ones of it.

        With ``again`` it owns no parameters but runs with those of that segment (ALBERT).
        """
        self._again = again
        self.frozen = frozen or (self.options.without_gradients and not self.options.of_trained)
        self.segment = Segment(
            name, len(self.segments), repeat=repeat, checkpointed=checkpointed, part=part
        )
        self.segment.input, self.segment.further_inputs = x, tuple(further)
        self.segment.beside = beside_of(name)
        if part is ModelPart.HEAD and x is not None and self._is_of_head(x):
            self.segment.logits = x.storage
        if checkpointed and self.hooks is not None and x is not None:
            self.segment.input_away = self.hooks.take_input(x)
        if self.adaptation is not None or self.options.trained is not None:
            earlier = (each.repeat for each in self.segments if each.name == name)
            self._repetition = sum(earlier)
        if self.adaptation is not None and again is None:
            self.adapted = self.adaptation.at(name, self._repetition)
        self.segments.append(self.segment)

    def _is_of_head(self, x: Tensor) -> bool:
        made = x.storage.segment
        return made >= 0 and self.segments[made].part is ModelPart.HEAD

    def end(self, output: Tensor, further: Sequence[Tensor] = ()) -> None:
        """Finish the segment; ``output`` and ``further`` streams are what the next one reads."""
        self.touch(*self.segment.lingering)
        self.segment.output, self.segment.further_outputs = output, tuple(further)
        if not output.requires_grad:
            # No operation keeps anything, so nothing holds the checkpoint, nor the input that it was given.
            self.segment.checkpointed, self.segment.input_away = False, None
        if not self.segment.checkpointed:
            for made in self.segment.returned:
                kept = any(made in operation.saved for operation in self.segment.operations)
                made.kept_by_maker = kept and made.segment == self.segment.index
        if self.segment.checkpointed:
            from memplan.graph.core.selective import keeps_every_other_matmul, kept_outputs

            # Without a graph nothing holds what was kept for the second run.
            if keeps_every_other_matmul(self.options) and output.requires_grad:
                self.segment.kept_outputs |= kept_outputs(self.segment)

    def touch(self, *tensors: Tensor) -> None:
        """Note that variables still hold these tensors at this point of the segment."""
        position = len(self.segment.operations) - 1
        for tensor in tensors:
            storage = tensor.storage
            if storage.segment == self.segment.index:
                storage.last_read = max(storage.last_read, position)
                self._touches += 1
                storage.touched = self._touches

    def be_handed(self, tensor: Tensor) -> None:
        """Note that the segment is given a tensor of an earlier one, whether it reads it or not."""
        if tensor.storage.segment >= 0:
            _note(self.segment.external_reads, tensor.storage)

    def enter(self, module: str) -> None:
        """Note that a module is called here that owns no parameters itself: the model, a dropout."""
        self.segment.entered.append((len(self.segment.operations), module))

    def leave(self, module: str) -> None:
        """Note that it returns here, something that a gradient will reach."""
        self.segment.left.append((len(self.segment.operations), module))

    def read(self, module: str, weight: str) -> None:
        """Note that a module reads a weight of one inside it here by itself."""
        self.segment.reads.append((len(self.segment.operations), module, weight))

    def sdpa_kernel(self, call: SdpaCall) -> ScoreKernel:
        """The kernel that the card takes for a call of ``scaled_dot_product_attention``."""
        kernel = choose_sdpa_kernel(call, self.options.sdpa)
        self.sdpa_calls[call] = kernel
        return kernel

    def tensor(self, numel: int, dtype: DType, *, requires_grad: bool = False) -> Tensor:
        """Make a tensor with a storage of its own in the present segment."""
        segment = self.segment
        storage = Storage(allocated_bytes(numel, dtype), segment.index, len(segment.operations))
        return Tensor(numel, dtype, storage, requires_grad=requires_grad)

    def record(
        self,
        kind: OperationKind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        saves: Sequence[Tensor] = (),
        gradients: Sequence[int] = (),
        forward_scratch_bytes: int | Sequence[int] = 0,
        backward_scratch_bytes: int | Sequence[int] = 0,
        flops: int = 0,
        in_python: bool = False,
        pins: Sequence[Tensor] = (),
        tiles: Tiles | None = None,
        sends: Sends = NO_SENDS,
    ) -> None:
        """Append an operation and settle what it keeps alive."""
        segment = self.segment
        index = segment.index
        position = len(segment.operations)
        x = segment.input
        given = segment.given if segment.further_inputs or x is None else (x.storage,)
        differentiable = False
        for tensor in inputs:
            if tensor.requires_grad:
                differentiable = True
            storage = tensor.storage
            if storage.segment == index:
                storage.last_read = position
                storage.touched = 0
            elif storage.segment >= 0 and storage not in given:
                _note(segment.external_reads, storage)
        saved: list[Storage] = []
        outside: list[Storage] = []
        pinned: list[Storage] = []
        saves_output = keeps_weight = False
        handed: Handed = ()
        if differentiable:
            for tensor in outputs:
                if tensor.dtype.is_floating:
                    tensor.requires_grad = True
            if self.hooks is not None and saves and not segment.checkpointed:
                saves, handed = self.hooks.take(
                    kind, saves, inputs=inputs, outputs=outputs,
                    in_head=segment.part is ModelPart.HEAD, in_python=in_python,
                    is_shared=self._is_shared,
                )  # fmt: skip
            for tensor in saves:
                storage = tensor.storage
                if storage.segment < 0:
                    keeps_weight = True
                    continue
                if storage in saved:
                    continue
                if storage.segment == index or storage in given:
                    saved.append(storage)
                    if tensor in outputs:
                        saves_output = True
                else:
                    _note(segment.external_saves, storage)
                    _note(outside, storage)
            for tensor in pins:
                storage = tensor.storage
                if storage.segment == index or storage in given:
                    pinned.append(storage)
                elif storage.segment >= 0:
                    _note(segment.external_saves, storage)
        segment.operations.append(
            Operation(
                kind, inputs, outputs, saved, gradients if differentiable else (),
                forward_scratch=_blocks(forward_scratch_bytes) if forward_scratch_bytes else (),
                backward_scratch=_blocks(backward_scratch_bytes) if backward_scratch_bytes else (),
                flops=flops, keeps_weight=keeps_weight,
                saves_output=saves_output, in_python=in_python,
                pinned=pinned, outside=outside, handed=handed, tiles=tiles, sends=sends,
            )
        )  # fmt: skip

    def _is_shared(self, storage: Storage) -> bool:
        """Whether it is of an earlier segment, and not what the present one is given."""
        return 0 <= storage.segment < self.segment.index and not self._is_input(storage)

    def _is_input(self, storage: Storage) -> bool:
        x, further = self.segment.input, self.segment.further_inputs
        if x is not None and storage is x.storage:
            return True
        return bool(further) and any(storage is each.storage for each in further)


def _sorted_segment(segment: Segment, tile: int) -> Segment:
    """With its sorts as another card has them; itself where there are none."""
    operations = [_sorted_operation(each, tile) for each in segment.operations]
    if all(one is other for one, other in zip(operations, segment.operations, strict=True)):
        return segment
    made = copy(segment)
    made.operations = operations
    return made


def _sorted_operation(operation: Operation, tile: int) -> Operation:
    forward = sorted_as(operation.forward_scratch, tile)
    backward = sorted_as(operation.backward_scratch, tile)
    if forward is operation.forward_scratch and backward is operation.backward_scratch:
        return operation
    made = copy(operation)
    made.forward_scratch, made.backward_scratch = forward, backward
    return made


def _blocks(scratch: int | Sequence[int]) -> Sequence[int]:
    """One block, or each of several; each as the allocator rounds it up."""
    if isinstance(scratch, int):
        return (scratch,) if scratch else ()
    return scratch


def _note(storages: list[Storage], storage: Storage) -> None:
    if storage not in storages:
        storages.append(storage)


SMALL_TABLE = 4
"""Rows of a table for each multiprocessor, below which its gradient is summed at once."""


def _are_few(num_rows: int, options: TapeOptions) -> bool:
    """Whether all rows of a table are summed at once: 527 on 132 multiprocessors, 431 on 108 (torch 2.13)."""
    return num_rows < SMALL_TABLE * options.multiprocessors
