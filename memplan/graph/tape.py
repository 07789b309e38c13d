"""The tape: a model's operations, in order, on tensors that have a size but no values.

A ``Tensor`` is a number of elements and a dtype on a ``Storage``; views share their storage, and a
storage counts once however many operations keep it, as autograd counts. An ``Operation`` says what
it allocates, which storages it keeps for the backward pass, and how the gradient of its output
becomes gradients of its inputs. Operations stand in ``Segment``s: the embedding, one segment for
each run of equal layers, the head with its loss. What is alive when is found by walking the
segments (``memplan.memory.walk``), never assumed here.

Sizes are rounded up to 512 bytes, the smallest block of torch's caching allocator
(c10/core/AllocatorConfig.h, torch 2.13).
"""

from collections.abc import Sequence
from enum import IntEnum

from memplan.dtypes import DType
from memplan.records import dataclass
from memplan.training.freezing import FrozenParts
from memplan.training.kernels import Kernels

ALLOCATION_ROUNDING = 512
"""Bytes to which torch's allocator rounds every block up."""


def allocated_bytes(numel: int, dtype: DType) -> int:
    """Bytes that the allocator hands out for a tensor [bytes].

    >>> allocated_bytes(100, DType.FP32)
    512
    """
    return -(-numel * dtype.num_bytes // 512) * 512


class Storage:
    """A block of memory: its size, who reads it last, how many operations keep it."""

    __slots__ = ("held", "last_read", "num_bytes", "segment", "weight_cast")

    def __init__(self, num_bytes: int, segment: int, position: int) -> None:
        self.num_bytes = num_bytes
        self.segment = segment
        """Which segment made it."""
        self.last_read = position
        """The last operation of its segment that reads it in the forward pass."""
        self.held = False
        """Something outside its segment keeps it until ``Tape.release``."""
        self.weight_cast = False
        """A weight's 16-bit copy in autocast's cache: it lives until the context ends."""


class Tensor:
    """A number of elements and a dtype, on a storage."""

    __slots__ = ("by_head", "dtype", "numel", "requires_grad", "storage")

    def __init__(
        self, numel: int, dtype: DType, storage: Storage, *, requires_grad: bool = False
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self.storage = storage
        self.requires_grad = requires_grad
        self.by_head = False
        """Queries, keys or values that lie head by head in memory, not token by token."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What a weight that stacks the matrices of all routed experts consists of."""

    num_experts: int
    num_active: int
    """Experts that each token passes."""
    num_matrices: int = 1
    """Linear layers fused in it: 2 where gate and up are one."""


class Parameter(Tensor):
    """A weight: a leaf whose gradient outlives the backward pass."""

    __slots__ = ("experts", "module", "name", "shape", "unused")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        module: str,
        trainable: bool,
        experts: ExpertShare | None = None,
    ) -> None:
        numel = 1
        for size in shape:
            numel *= size
        super().__init__(
            numel, dtype, Storage(allocated_bytes(numel, dtype), -1, 0), requires_grad=trainable
        )
        self.name = name
        self.module = module
        """The module that owns it directly."""
        self.shape = shape
        self.experts = experts
        """Set where it holds all routed experts' matrices."""
        self.unused = False
        """No loss reaches it: it never has a gradient, and a plain optimizer no states for it."""

    @property
    def active_numel(self) -> int:
        """Elements that one token's computation uses [elements]."""
        if self.experts is None:
            return self.numel
        return self.numel // self.experts.num_experts * self.experts.num_active

    @property
    def unfused_numel(self) -> int:
        """Elements of one expert's matrix, as a module of its own would hold it [elements]."""
        if self.experts is None:
            return self.numel
        return self.numel // (self.experts.num_experts * self.experts.num_matrices)


class Gradient(IntEnum):
    """How one input's gradient comes out of an operation.

    A positive number of the same field means: a temporary of that many bytes is made first and then
    summed down to the input's size (broadcast inputs).
    """

    NONE = -2
    ALIAS = -1
    """The output's gradient itself, or a view of it."""
    FRESH = 0
    """A new tensor of the input's size."""


    SAVED = -3
    """A storage the operation kept in forward, handed over as it is; in the order of ``saved``."""


class Operation:
    """One recorded operation."""

    __slots__ = (
        "backward_scratch_bytes",
        "flops",
        "forward_scratch_bytes",
        "gradients",
        "inputs",
        "name",
        "outputs",
        "saved",
        "saves_output",
    )

    def __init__(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        saved: Sequence[Storage],
        gradients: Sequence[int],
        *,
        forward_scratch_bytes: int = 0,
        backward_scratch_bytes: int = 0,
        flops: int = 0,
        saves_output: bool = False,
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.saved = saved
        """Storages kept for backward; empty where nothing requires a gradient."""
        self.gradients = gradients
        """For each input, a ``Gradient`` or the bytes of a temporary; empty without autograd."""
        self.forward_scratch_bytes = forward_scratch_bytes
        self.backward_scratch_bytes = backward_scratch_bytes
        """Temporaries alive at once in the backward formula, beside the gradients it returns."""
        self.flops = flops
        self.saves_output = saves_output
        """One of its own outputs is kept, so recomputation must run it to get there."""


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of a segment that is computed again on its own in backward."""

    start: int
    stop: int
    """One past its last operation."""
    dropped: frozenset[Storage]
    """What only the region's own backward pass needs."""


class Segment:
    """A stretch of operations: the embedding, one layer of a run, the head."""

    __slots__ = (
        "carried", "checkpointed", "component", "external_reads", "external_saves", "index", "input",
        "kept_outputs", "lingering", "name", "operations", "output", "parameters", "regions",
        "releases", "repeat", "tied",
    )  # fmt: skip

    def __init__(self, name: str, index: int, *, repeat: int, checkpointed: bool) -> None:
        self.name = name
        self.index = index
        self.repeat = repeat
        """How many times the segment is run, each time with parameters of its own."""
        self.checkpointed = checkpointed
        """Its activations are dropped after the forward pass and computed again in backward."""
        self.operations: list[Operation] = []
        self.parameters: list[Parameter] = []
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.external_reads: list[Storage] = []
        """Storages of earlier segments that this one reads, the input left out."""
        self.external_saves: list[Storage] = []
        """Those of them that its operations keep for backward."""
        self.releases: list[Storage] = []
        """Storages of earlier segments that are let go when this one ends."""
        self.carried: Storage | None = None
        """What the model holds of one repetition until the next one ends, kept or not."""
        self.lingering: list[Tensor] = []
        """What variables hold until the segment ends."""
        self.tied: list[tuple[str, Parameter]] = []
        """Modules of this segment, and the weights of earlier ones that they own too."""
        self.component = "activations"
        self.regions: list[Region] = []
        """Stretches that are recomputed on their own."""
        self.kept_outputs: frozenset[Storage] = frozenset()
        """In a checkpointed segment, what its policy keeps all the same."""

    @property
    def num_copies(self) -> int:
        """How many sets of its parameters the model owns."""
        return self.repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeOptions:
    """What decides how the operations are written down."""

    batch_size: int = 1
    seq_len: int = 1
    target_seq_len: int = 1
    weights: DType = DType.FP32
    compute: DType = DType.FP32
    """Weights and the residual stream as the layers see them."""
    autocast: DType | None = None
    kernels: Kernels = Kernels()
    dropout: float | None = None
    """Overrides every dropout probability; None keeps the config's."""
    decomposed: bool = False
    """Backward formulas in the elementwise steps of torch's reference decompositions, and gradients
    summed out of place, as fake tensors run them; CUDA has one kernel for each, and sums in place."""
    flash_available: bool = True
    """The GPU runs flash attention (sm_80 or newer)."""
    checkpointed_layers: float = 0.0
    """Share of layers whose activations are recomputed."""
    selective: bool = False
    """Checkpointing is selective, by the kernels' policy."""
    outputs_held: bool = False
    """The training loop keeps the logits until after backward."""
    upcast_outputs: bool = False
    """The training loop copies the logits to fp32."""
    freeze: FrozenParts = FrozenParts()
    """Parts whose parameters are not trained."""


class Tape:
    """Records a model's operations, segment by segment."""

    def __init__(self, options: TapeOptions) -> None:
        self.options = options
        self.autocast = options.autocast
        self.compute = options.compute
        self.kernels = options.kernels
        self.decomposed = options.decomposed
        self.frozen = False
        """Parameters declared from here on are not trained."""
        self._again: Segment | None = None
        self.segments: list[Segment] = []
        self.segment = Segment("", 0, repeat=1, checkpointed=False)
        self.inputs_bytes = 0
        """Token ids, labels and whatever else the batch itself holds [bytes]."""
        self.flash_decides = False
        """Some kernel was chosen by whether the GPU runs flash attention."""
        self.buffers_bytes = 0
        """Buffers that lie beside the parameters [bytes]."""
        self.leaves: list[Tensor] = []
        """Activations that require a gradient without being computed from any parameter."""
        self._casts: dict[Parameter, Tensor] = {}
        self.cached: list[tuple[Tensor, int]] = []
        """Keys and values that the outputs hold, and how many layers have made them."""

    # -- segments and parameters -----------------------------------------------------------------

    def begin(
        self,
        name: str,
        *,
        repeat: int = 1,
        checkpointed: bool = False,
        frozen: bool = False,
        again: Segment | None = None,
        x: Tensor | None = None,
    ) -> None:
        """Start a segment that reads ``x``, the output of the one before.

        With ``again`` it owns no parameters but runs with those of that segment (ALBERT).
        """
        self._again = again
        self.frozen = frozen
        self.segment = Segment(
            name, len(self.segments), repeat=repeat, checkpointed=checkpointed
        )
        self.segment.input = x
        self.segments.append(self.segment)

    def end(self, output: Tensor) -> None:
        """Finish the segment; ``output`` is what the next one reads."""
        self.touch(*self.segment.lingering)
        self.segment.output = output
        if self.segment.checkpointed:
            from memplan.graph.selective import keeps_every_other_matmul, kept_outputs

            if keeps_every_other_matmul(self):
                self.segment.kept_outputs = kept_outputs(self.segment)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor alive beyond its last reader, until ``release``: an outer variable."""
        tensor.storage.held = True

    def cache(self, tensor: Tensor) -> None:
        """Hold a tensor of every repetition of the segment until the loss is there."""
        self.hold(tensor)
        self.cached.append((tensor, self.segment.repeat))

    def release_cache(self) -> None:
        """Let all that was cached go at the end of the present segment."""
        for tensor, repeat in self.cached:
            self.segment.releases += [tensor.storage] * repeat

    def release(self, tensor: Tensor) -> None:
        """Let a held tensor go at the end of the present segment."""
        self.segment.releases.append(tensor.storage)

    def touch(self, *tensors: Tensor) -> None:
        """Note that variables still hold these tensors at this point of the segment."""
        position = len(self.segment.operations) - 1
        for tensor in tensors:
            if tensor.storage.segment == self.segment.index:
                tensor.storage.last_read = max(tensor.storage.last_read, position)

    def linger(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the present segment ends: a name in its frame."""
        self.segment.lingering.append(tensor)

    def leaf(self, tensor: Tensor) -> None:
        """Let a made tensor require a gradient: both stay until the backward pass is over."""
        tensor.requires_grad = True
        self.hold(tensor)
        self.leaves.append(tensor)

    def carry(self, tensor: Tensor) -> None:
        """Note that the model's own variable holds a tensor until the next layer has returned."""
        self.segment.carried = tensor.storage

    def tie(self, weight: Parameter, module: str) -> None:
        """Note that a module of the present segment owns an earlier segment's weight too."""
        self.segment.tied.append((module, weight))

    def parameter(
        self,
        name: str,
        *shape: int,
        module: str = "",
        dtype: DType | None = None,
        trainable: bool = True,
        experts: ExpertShare | None = None,
    ) -> Parameter:
        """Declare a weight of the present segment, owned by ``module`` (by default its prefix)."""
        if self._again is not None:
            return next(each for each in self._again.parameters if each.name == name)
        made = Parameter(
            name,
            shape,
            dtype or self.options.compute,
            module=module or name.rpartition(".")[0],
            trainable=trainable and not self.frozen,
            experts=experts,
        )
        self.segment.parameters.append(made)
        return made

    def buffer(self, numel: int, dtype: DType) -> Tensor:
        """Declare a tensor that the present segment's module owns beside its parameters."""
        storage = Storage(allocated_bytes(numel, dtype), -1, 0)
        self.buffers_bytes += storage.num_bytes * self.segment.repeat
        return Tensor(numel, dtype, storage)

    # -- recording -------------------------------------------------------------------------------

    def tensor(self, numel: int, dtype: DType, *, requires_grad: bool = False) -> Tensor:
        """Make a tensor with a storage of its own in the present segment."""
        segment = self.segment
        storage = Storage(
            -(-numel * dtype.num_bytes // 512) * 512, segment.index, len(segment.operations)
        )
        return Tensor(numel, dtype, storage, requires_grad=requires_grad)

    def record(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        saves: Sequence[Tensor] = (),
        gradients: Sequence[int] = (),
        forward_scratch_bytes: int = 0,
        backward_scratch_bytes: int = 0,
        flops: int = 0,
    ) -> None:
        """Append an operation and settle what it keeps alive."""
        segment = self.segment
        index = segment.index
        position = len(segment.operations)
        differentiable = False
        for tensor in inputs:
            if tensor.requires_grad:
                differentiable = True
            storage = tensor.storage
            if storage.segment == index:
                storage.last_read = position
            elif storage.segment >= 0 and not self._is_input(storage):
                _note(segment.external_reads, storage)
        saved: list[Storage] = []
        saves_output = False
        if differentiable:
            for tensor in outputs:
                if tensor.dtype.is_floating:
                    tensor.requires_grad = True
            for tensor in saves:
                storage = tensor.storage
                if storage.segment < 0 or storage in saved:
                    continue
                if storage.segment == index or self._is_input(storage):
                    saved.append(storage)
                    if tensor in outputs:
                        saves_output = True
                else:
                    _note(segment.external_saves, storage)
        segment.operations.append(
            Operation(
                name, inputs, outputs, saved, gradients if differentiable else (),
                forward_scratch_bytes=forward_scratch_bytes,
                backward_scratch_bytes=backward_scratch_bytes,
                flops=flops, saves_output=saves_output,
            )
        )  # fmt: skip

    def _is_input(self, storage: Storage) -> bool:
        x = self.segment.input
        return x is not None and storage is x.storage

    # -- the plainest operations -----------------------------------------------------------------

    def view(self, x: Tensor, numel: int) -> Tensor:
        """Take a part of a tensor as a view: the storage is shared; see ``slice`` for autograd."""
        return Tensor(numel, x.dtype, x.storage, requires_grad=x.requires_grad)

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Copy into another dtype; the same tensor where it already has it."""
        if x.dtype is dtype:
            return x
        out = self.tensor(x.numel, dtype)
        out.by_head = x.by_head
        self.record("to", (x,), (out,), gradients=(Gradient.FRESH,))
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
            self.record("to", (weight,), (cached,), gradients=(Gradient.FRESH,))
            self._casts[weight] = cached
        return cached

    def elementwise(
        self,
        name: str,
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
            name, (x,), (out,), saves=saves, gradients=(Gradient.FRESH,),
            backward_scratch_bytes=scratch,
        )  # fmt: skip
        return out

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum two tensors of one size; the gradient of both is the output's own."""
        dtype = left.dtype if left.dtype is right.dtype else DType.FP32
        out = self.tensor(max(left.numel, right.numel), dtype)
        self.record(
            "add",
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
            "mul",
            (left, right),
            (out,),
            saves=saves,
            gradients=(_product_gradient(left, out), _product_gradient(right, out)),
        )
        return out

    def scale(self, x: Tensor, name: str = "mul_scalar") -> Tensor:
        """Multiply by, divide by or add a number: nothing is kept."""
        out = self.tensor(x.numel, x.dtype)
        self.record(name, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def shift(self, x: Tensor) -> Tensor:
        """Add a number: nothing is kept, and the gradient passes through."""
        out = self.tensor(x.numel, x.dtype)
        self.record("add_scalar", (x,), (out,), gradients=(Gradient.ALIAS,))
        return out

    def mean(self, x: Tensor, width: int) -> Tensor:
        """Average over the last dimension of ``width`` elements."""
        out = self.tensor(x.numel // width, x.dtype)
        self.record("mean", (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def square(self, x: Tensor) -> Tensor:
        """``x.pow(2)``: keeps x; its backward formula makes two copies on the way."""
        out = self.tensor(x.numel, x.dtype)
        self.record(
            "pow", (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
            backward_scratch_bytes=2 * out.storage.num_bytes,
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
        self.record("cat", parts, (out,), gradients=gradients)
        return out

    def slice(self, x: Tensor, numel: int) -> Tensor:
        """A view of a part: its gradient is a zero-filled tensor of the whole."""
        out = self.view(x, numel)
        self.record("slice", (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def split(self, x: Tensor, *numels: int) -> list[Tensor]:
        """Views of consecutive parts; in backward their gradients are joined into one tensor."""
        outs = [self.view(x, numel) for numel in numels]
        self.record("split", (x,), outs, gradients=(Gradient.FRESH,))
        return outs

    def contiguous(self, x: Tensor) -> Tensor:
        """Copy into row-major order; the gradient passes through as a view."""
        out = self.tensor(x.numel, x.dtype)
        self.record("clone", (x,), (out,), gradients=(Gradient.ALIAS,))
        return out


def _note(storages: list[Storage], storage: Storage) -> None:
    if storage not in storages:
        storages.append(storage)


def _sum_gradient(part: Tensor, out: Tensor) -> int:
    """The gradient of one summand: passed on, cast, or summed where it was broadcast."""
    if part.numel != out.numel:
        return Gradient.FRESH
    return Gradient.ALIAS if part.dtype is out.dtype else Gradient.FRESH


def _product_gradient(part: Tensor, out: Tensor) -> int:
    """The gradient of one factor: a product, first of the output's size where it was broadcast.

    The product has the output's dtype; engine and formula cast it to the factor's own.
    """
    if part.numel != out.numel or part.dtype is not out.dtype:
        return out.storage.num_bytes
    return Gradient.FRESH
