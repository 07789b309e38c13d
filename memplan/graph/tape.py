"""The tape: a model's operations, in order, on tensors that have a size but no values.

A ``Tensor`` is a number of elements and a dtype on a ``Storage``; views share their storage, and a
storage counts once however many operations keep it, as autograd counts. An ``Operation`` says what
it allocates, which storages it keeps for the backward pass, and how the gradient of its output
becomes gradients of its inputs. Operations stand in ``Segment``s: the embedding, one segment for
each run of equal layers, the head with its loss. What is alive when is found by walking the
segments (``memplan.memory.walk``), never assumed here.

Sizes are rounded up as torch's caching allocator rounds them (``memplan.graph.tensors``).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.options import TapeOptions
from memplan.graph.overlay import BASE_LAYER, ORIGINAL, adapted_weights
from memplan.graph.segments import BUFFER_WORDS, RESULT, Buffer, Gradient, Operation, Segment, Tiles
from memplan.graph.tensors import ExpertShare, Parameter, Storage, Tensor, allocated_bytes
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.training.exchange import NO_SENDS, Sends
from memplan.training.sdpa import ScoreKernel, SdpaCall, choose_sdpa_kernel

if TYPE_CHECKING:
    from memplan.graph.away import Handed, Hooks


class Tape:
    """Records a model's operations, segment by segment."""

    def __init__(self, options: TapeOptions, *, source: str = "model") -> None:
        self.options = options
        self.source = source
        """Where the model was read, for messages."""
        self.autocast = options.autocast
        self.compute = options.compute
        self.kernels = options.kernels
        self.decomposed = options.decomposed
        self.frozen = options.without_gradients
        """Parameters declared from here on are not trained."""
        self.hooks: Hooks | None = None
        """What takes tensors that operations keep to CPU RAM."""
        if options.offload.hooks:
            from memplan.graph.away import hooks_of  # only then

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
        self.inputs_bytes = 0
        """Token ids, labels and whatever else the batch itself holds [bytes]."""
        self.declared: tuple[tuple[str, ...], ...] = ()
        """The order in which the class declares its parameters: the name of a segment, then modules
        of it or single parameters, for each stretch; empty: not known."""
        self.sdpa_calls: dict[SdpaCall, ScoreKernel] = {}
        """What torch's dispatcher was asked, and the kernel it took."""
        self.asked_multiprocessors = False
        """Something on it depends on how many multiprocessors the card has."""
        self.buffers: list[Buffer] = []
        """What lies beside the parameters."""
        self.buffers_in_use: tuple[int, ...] = ()
        """Sizes to which Megatron's global memory buffer grows in the first pass, one after another."""
        self.returned: list[Tensor] = []
        """What the model returns beside the loss: logits."""
        self.loss_apart = False
        """torch.compile breaks its graph before the loss."""
        self.compiled_before: int | None = None
        """The segment before which the model returns, and the trainer goes on without torch.compile."""
        self.leaves: list[Tensor] = []
        """Activations that require a gradient without being computed from any parameter."""
        self._casts: dict[Parameter, Tensor] = {}
        self._touches = 0
        self.joined_at: int | None = None
        """The segment before which passes of other models run, whose results it takes."""
        self.cached: list[tuple[Tensor, Segment]] = []
        """Keys and values that the outputs hold, with the segment each repetition of which does."""

    @property
    def buffers_bytes(self) -> int:
        """All buffers together [bytes]."""
        return sum(each.num_bytes * each.segment.repeat for each in self.buffers)

    @property
    def num_multiprocessors(self) -> int:
        """Of the card, where kernels go by it."""
        self.asked_multiprocessors = True
        return self.options.multiprocessors

    def as_on(self, options: TapeOptions) -> "Tape | None":
        """The same operations with the options of another card; None where that runs others."""
        if self.asked_multiprocessors or options.is_tiled:
            return None
        for call, kernel in self.sdpa_calls.items():
            if choose_sdpa_kernel(call, options.sdpa) is not kernel:
                return None
        made = copy(self)
        made.options = options
        return made

    # -- segments and parameters -----------------------------------------------------------------

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
        self.frozen = frozen or self.options.without_gradients
        self.segment = Segment(
            name, len(self.segments), repeat=repeat, checkpointed=checkpointed, part=part
        )
        self.segment.input, self.segment.further_inputs = x, tuple(further)
        if checkpointed and self.hooks is not None and x is not None:
            self.segment.input_away = self.hooks.take_input(x)
        if self.adaptation is not None:
            earlier = (each.repeat for each in self.segments if each.name == name)
            self._repetition = sum(earlier)
            if again is None:
                self.adapted = self.adaptation.at(name, self._repetition)
        self.segments.append(self.segment)

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
            from memplan.graph.selective import keeps_every_other_matmul, kept_outputs

            # Without a graph nothing holds what was kept for the second run.
            if keeps_every_other_matmul(self.options) and output.requires_grad:
                self.segment.kept_outputs |= kept_outputs(self.segment)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor alive beyond its last reader, until ``release``: an outer variable."""
        tensor.storage.held = True

    def hold_graph(self, *tensors: Tensor) -> None:
        """Hold tensors that the model keeps past backward, where a checkpointed segment makes them anew.

        The graph of the second run goes with them, and what its operations keep.
        """
        for tensor in tensors:
            self.hold(tensor)
        if not self.segment.checkpointed:
            return
        wanted = {tensor.storage for tensor in tensors}
        held: dict[Storage, None] = dict.fromkeys(wanted)
        for operation in reversed(self.segment.operations):
            if any(each.storage in wanted for each in operation.outputs):
                wanted |= {each.storage for each in operation.inputs if each.requires_grad}
                held.update(dict.fromkeys(operation.saved))
        own = [each for each in held if each.segment == self.segment.index]
        self.segment.graph_held += tuple(own)

    def cache(self, tensor: Tensor) -> None:
        """Hold a tensor of every repetition of the segment until the loss is there."""
        self.hold(tensor)
        self.cached.append((tensor, self.segment))

    def release_cache(self) -> None:
        """Let all that was cached go at the end of the present segment."""
        for tensor, segment in self.cached:
            self.segment.releases += [tensor.storage] * segment.repeat

    @property
    def cached_once(self) -> frozenset[Storage]:
        """Cached in a first pass alone: backward keeps what it makes anew."""
        return frozenset(each.storage for each, segment in self.cached if segment.checkpointed)

    def release(self, tensor: Tensor) -> None:
        """Let a held tensor go at the end of the present segment."""
        self.segment.releases.append(tensor.storage)

    def give_out(self, tensor: Tensor) -> None:
        """Return a tensor beside the loss: it dies with the outputs, once the forward pass is over."""
        self.hold(tensor)
        self.release(tensor)

    def touch(self, *tensors: Tensor) -> None:
        """Note that variables still hold these tensors at this point of the segment."""
        position = len(self.segment.operations) - 1
        for tensor in tensors:
            storage = tensor.storage
            if storage.segment == self.segment.index:
                storage.last_read = max(storage.last_read, position)
                self._touches += 1
                storage.touched = self._touches

    def linger(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the present segment ends: a name in its frame."""
        self.segment.lingering.append(tensor)

    def let_input_go(self) -> None:
        """Note that the model's own variable names something else than the segment's input from here on."""
        x = self.segment.input
        if x is not None and not (x.storage.held or x.storage.kept_by_maker):
            self.segment.input_let_go = len(self.segment.operations) - 1

    def leaf(self, tensor: Tensor) -> None:
        """Let a made tensor require a gradient: both stay until the backward pass is over."""
        if self.options.without_gradients:
            return
        tensor.requires_grad = True
        self.hold(tensor)
        self.leaves.append(tensor)

    def embedded(self, tensor: Tensor, table: Parameter) -> None:
        """Note that the input embeddings' module returns this: it may be made to require a gradient.

        Then that gradient reaches the module, though it stops there.
        """
        if self.options.input_gradients and not tensor.requires_grad:
            self.leaf(tensor)
            self.segment.left.append((0, table.module))

    def carry(self, *tensors: Tensor) -> None:
        """Note that the model's own variable holds tensors until the next layer has returned."""
        self.segment.carried = tuple(each.storage for each in tensors)

    def sdpa_kernel(self, call: SdpaCall) -> ScoreKernel:
        """The kernel that the card takes for a call of ``scaled_dot_product_attention``."""
        kernel = choose_sdpa_kernel(call, self.options.sdpa)
        self.sdpa_calls[call] = kernel
        return kernel

    def tie(self, weight: Parameter, module: str) -> None:
        """Note that a module of the present segment owns an earlier segment's weight too."""
        self.segment.tied.append((module, weight))

    def enter(self, module: str) -> None:
        """Note that a module is called here that owns no parameters itself: the model, a dropout."""
        self.segment.entered.append((len(self.segment.operations), module))

    def leave(self, module: str) -> None:
        """Note that it returns here, something that a gradient will reach."""
        self.segment.left.append((len(self.segment.operations), module))

    def parameter(
        self,
        name: str,
        *shape: int,
        module: str = "",
        dtype: DType | None = None,
        trainable: bool = True,
        experts: ExpertShare | None = None,
        of_adapter: bool = False,
        role: WeightRole = WeightRole.MATRIX,
    ) -> Parameter:
        """Declare a weight of the present segment, owned by ``module`` (by default its prefix).

        Beside an adapter the model's own are frozen, but for those that it trains too.
        """
        if self._again is not None:
            wrapped = f"{name.rpartition('.')[0]}{BASE_LAYER}.{name.rpartition('.')[2]}"
            found = [each for each in self._again.parameters if each.name in (name, wrapped)]
            if found:
                return found[0]
            assert of_adapter, name  # DoRA's magnitudes are declared where they are first read
        if of_adapter:
            # A module that is called twice has one adapter.
            for each in self.segment.parameters:
                if each.name == name:
                    return each
        if any(size < 1 for size in shape):
            sizes = " x ".join(str(size) for size in shape)
            msg = (
                f"{self.source}: {name}: this weight would be of {sizes} elements: one of the "
                "config's sizes, ratios or multipliers is too small"
            )
            raise ConfigError(msg)
        module = module or name.rpartition(".")[0]
        trainable = trainable and not self.frozen
        copied = False
        if self.adaptation is not None and not of_adapter:
            copied = self.adaptation.saves(self.segment.name, self._repetition, module)
            trainable &= name.endswith(".bias") and self.adaptation.trains_bias(
                module, self.adapted
            )
            wrapper = ORIGINAL if copied else BASE_LAYER if module in self.adapted else ""
            wrapper += BASE_LAYER * len(adapted_weights(self.adapted, module))
            name, module = f"{module}{wrapper}{name.removeprefix(module)}", module + wrapper
        made = Parameter(
            name,
            shape,
            dtype or self._usual_dtype(role),
            module=module,
            trainable=trainable,
            experts=experts,
            of_adapter=of_adapter,
            role=role,
            block=self.block,
        )
        self.segment.parameters.append(made)
        return self._trained_copy(made) if copied else made

    @contextmanager
    def declared_weights(self, owner: Segment | None = None) -> Iterator[None]:
        """Let what is written inside read the weights that a segment, the present one, declared already."""
        self._again = owner or self.segment
        yield
        self._again = None

    def own_copy(self, weight: Parameter, module: str) -> Parameter:
        """An earlier segment's weight, or the copy that a module of this one trains in its place."""
        if self.adaptation is None:
            return weight
        if not self.adaptation.saves(self.segment.name, self._repetition, module):
            return weight
        made = Parameter(
            f"{module}.modules_to_save.default.weight", weight.shape, weight.dtype,
            module=f"{module}.modules_to_save.default", trainable=not self.frozen, of_adapter=True,
            role=WeightRole.OUTPUT, block=self.block,
        )  # fmt: skip
        self.segment.parameters.append(made)
        return made

    def _usual_dtype(self, role: WeightRole) -> DType:
        norms = self.options.norms
        return norms if norms is not None and role is WeightRole.NORM else self.options.compute

    def _trained_copy(self, original: Parameter) -> Parameter:
        """The copy that is trained in a weight's place (peft's ``ModulesToSaveWrapper``)."""
        module = f"{original.module.removesuffix(ORIGINAL)}.modules_to_save.default"
        made = Parameter(
            f"{module}.{original.name.rpartition('.')[2]}", original.shape, original.dtype,
            module=module, trainable=not self.frozen, experts=original.experts, of_adapter=True,
            role=original.role, block=original.block,
        )  # fmt: skip
        self.segment.parameters.append(made)
        return made

    def matrix(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        module: str = "",
        role: WeightRole = WeightRole.MATRIX,
    ) -> Parameter:
        """Declare the weight of a ``torch.nn.Linear``: packed where the base is quantized.

        What a task adds stays as it is: the output matrix, and a head that is trained beside it
        (transformers 5.23, quantizers/base.py, ``get_keys_to_not_convert``).
        """
        whole = self.parameter(name, out_features, in_features, module=module, role=role)
        quantizer = self.options.quantizer
        stays = whole.of_adapter or self.segment.part is ModelPart.HEAD
        if quantizer is None or stays or self._again is not None:
            return whole
        return quantizer.pack(self, whole)

    def bias(self, name: str, weight: Parameter) -> Parameter:
        """Declare a linear layer's bias; one beside codes is kept in the format of their product.

        (bitsandbytes 0.50.2, ``Linear4bit.forward``: ``bias.data = bias.data.to(x.dtype)``)
        """
        dtype = None
        if weight.packed is not None:
            dtype = weight.packed.quantization.compute_dtype
        return self.parameter(name, weight.matrix_shape[0], dtype=dtype, role=WeightRole.OTHER)

    def buffer(self, numel: int, dtype: DType) -> Tensor:
        """Declare a tensor that the present segment's module owns beside its parameters."""
        storage = Storage(allocated_bytes(numel, dtype), -1, 0)
        self.hold_buffer(storage.num_bytes)
        return Tensor(numel, dtype, storage)

    def hold_buffer(self, num_bytes: int, words: str = BUFFER_WORDS) -> None:
        """Note a buffer of the present segment that no operation reads as it is."""
        self.buffers.append(Buffer(self.segment, len(self.segment.parameters), num_bytes, words))

    # -- recording -------------------------------------------------------------------------------

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
                pinned=pinned, handed=handed, tiles=tiles, sends=sends,
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

    # -- the plainest operations -----------------------------------------------------------------

    def view(self, x: Tensor, numel: int) -> Tensor:
        """Take a part of a tensor as a view: the storage is shared; see ``slice`` for autograd."""
        return Tensor(numel, x.dtype, x.storage, requires_grad=x.requires_grad)

    def alias(self, x: Tensor) -> Tensor:
        """A slice of the whole, which hands its gradient on as a node of its own."""
        out = self.view(x, x.numel)
        out.by_head = x.by_head
        self.record(OperationKind.VIEW, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out

    def flatten(self, x: Tensor) -> Tensor:
        """Lay the rows of all sequences in one dimension; a view, and a node of its own."""
        out = self.alias(x)
        out.is_flat = True
        return out

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Copy into another dtype; the same tensor where it already has it."""
        if x.dtype is dtype:
            return x
        out = self.tensor(x.numel, dtype)
        out.by_head = x.by_head
        out.by_column = x.by_column
        out.is_flat = x.is_flat
        self.record(OperationKind.TO, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def cast_argument(self, x: Tensor, dtype: DType) -> Tensor:
        """Copy what the segment is handed into another dtype, before it begins."""
        if x.dtype is dtype:
            return x
        reads = list(self.segment.external_reads)
        out = self.cast(x, dtype)
        self.segment.external_reads = reads
        self.segment.handed_in |= {out.storage}
        return out

    def cast_weight(self, weight: Parameter) -> Tensor:
        """Autocast's copy of a weight, made once per context and kept in its cache."""
        dtype = self.autocast
        if dtype is None or weight.dtype is dtype:
            return weight
        cached = self._casts.get(weight)
        if cached is None:
            cached = self.tensor(weight.numel, dtype)
            cached.storage.weight_cast = weight.requires_grad
            cached.by_column = True
            self.record(OperationKind.TO, (weight,), (cached,), gradients=(Gradient.FRESH,))
            self._casts[weight] = cached
        return cached

    def elementwise(
        self,
        kind: OperationKind,
        x: Tensor,
        *,
        saves_input: bool = False,
        saves_output: bool = False,
        decomposed_copies: int = 0,
        dtype: DType | None = None,
    ) -> Tensor:
        """Apply a function of one tensor.

        ``decomposed_copies`` are temporaries of the output's size that the reference decomposition
        of its backward formula holds beside the gradient it returns.
        """
        out = self.tensor(x.numel, dtype or x.dtype)
        saves = (x,) if saves_input else (out,) if saves_output else ()
        scratch = decomposed_copies * out.storage.num_bytes if self.decomposed else 0
        self.record(
            kind, (x,), (out,), saves=saves, gradients=(Gradient.FRESH,),
            backward_scratch_bytes=scratch,
        )  # fmt: skip
        return out

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum two tensors of one size; the gradient of both is the output's own."""
        dtype = left.dtype if left.dtype is right.dtype else DType.FP32
        out = self.tensor(max(left.numel, right.numel), dtype)
        self.record(
            OperationKind.ADD,
            (left, right),
            (out,),
            gradients=(_sum_gradient(left, out), _sum_gradient(right, out)),
        )
        return out

    def mul(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two tensors, the smaller one broadcast; each is kept for the other's gradient."""
        dtype = left.dtype if left.dtype is right.dtype else DType.FP32
        out = self.tensor(max(left.numel, right.numel), dtype)
        saves = []
        if left.requires_grad:
            saves.append(right)
        if right.requires_grad:
            saves.append(left)
        self.record(
            OperationKind.MUL,
            (left, right),
            (out,),
            saves=saves,
            gradients=(_product_gradient(left, out), _product_gradient(right, out)),
        )
        return out

    def scale(self, x: Tensor, kind: OperationKind = OperationKind.MUL_SCALAR) -> Tensor:
        """Multiply by, divide by or add a number: nothing is kept."""
        out = self.tensor(x.numel, x.dtype)
        self.record(kind, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def shift(self, x: Tensor) -> Tensor:
        """Add a number: nothing is kept, and the gradient passes through."""
        out = self.tensor(x.numel, x.dtype)
        out.by_column = x.by_column
        self.record(OperationKind.ADD_SCALAR, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out

    def mean(self, x: Tensor, width: int) -> Tensor:
        """Average over the last dimension of ``width`` elements."""
        out = self.tensor(x.numel // width, x.dtype)
        self.record(OperationKind.MEAN, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def square(self, x: Tensor) -> Tensor:
        """``x.pow(2)``, or any other power: keeps x; its backward formula makes two copies."""
        out = self.tensor(x.numel, x.dtype)
        self.record(
            OperationKind.POW, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
            backward_scratch_bytes=(out.storage.num_bytes, out.storage.num_bytes, RESULT),
        )  # fmt: skip
        return out

    def concatenate(self, *parts: Tensor) -> Tensor:
        """Copy tensors into one; their gradients are views of its gradient, or casts of them."""
        dtypes = {part.dtype for part in parts}
        out = self.tensor(
            sum(part.numel for part in parts), dtypes.pop() if len(dtypes) == 1 else DType.FP32
        )
        gradients = [
            Gradient.ALIAS if part.dtype is out.dtype else Gradient.FRESH for part in parts
        ]
        self.record(OperationKind.CAT, parts, (out,), gradients=gradients)
        return out

    def slice(self, x: Tensor, numel: int) -> Tensor:
        """A view of a part: its gradient is a zero-filled tensor of the whole."""
        out = self.view(x, numel)
        self.record(OperationKind.SLICE, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def split(self, x: Tensor, *numels: int) -> list[Tensor]:
        """Views of consecutive parts; in backward their gradients are joined into one tensor."""
        outs = [self.view(x, numel) for numel in numels]
        self.record(OperationKind.SPLIT, (x,), outs, gradients=(Gradient.FRESH,))
        return outs

    def contiguous(self, x: Tensor) -> Tensor:
        """Copy into row-major order; the gradient passes through as a view."""
        out = self.tensor(x.numel, x.dtype)
        self.record(OperationKind.CLONE, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out


def _blocks(scratch: int | Sequence[int]) -> Sequence[int]:
    """One block, or each of several; each as the allocator rounds it up."""
    if isinstance(scratch, int):
        return (scratch,) if scratch else ()
    return scratch


def _note(storages: list[Storage], storage: Storage) -> None:
    if storage not in storages:
        storages.append(storage)


def _sum_gradient(part: Tensor, out: Tensor) -> int:
    """The gradient of one summand: passed on, cast, or summed where it was broadcast."""
    if part.numel != out.numel:
        return Gradient.SUMMED
    return Gradient.ALIAS if part.dtype is out.dtype else Gradient.FRESH


def _product_gradient(part: Tensor, out: Tensor) -> int:
    """The gradient of one factor: a product, first of the output's size where it was broadcast.

    The product has the output's dtype; engine and formula cast it to the factor's own.
    """
    if part.numel != out.numel or part.dtype is not out.dtype:
        return out.storage.num_bytes
    return Gradient.FRESH
