"""The arithmetic of an estimate as a tree: phase, lifetime, component, tensors, formula, source."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.estimator.recording import kept_dtype, record_and_walk, tape_options
from memplan.fast_dataclass import dataclass
from memplan.graph.operation_kinds import QUANTIZED_PRODUCTS, OperationKind
from memplan.graph.segments import Operation, Segment, SegmentComponent
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Storage, Tensor
from memplan.memory.account import ComponentKind, Entry, Lifetime, Phase
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.spec import ModelSpec
from memplan.report.shape import scores_of
from memplan.report.timeline import LIFETIME_WORDS
from memplan.training.precision import PRECISIONS
from memplan.upward import Displayed

if TYPE_CHECKING:
    from memplan.dtypes import DType

EXPLAIN_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One figure, how it comes about, and what it is made of."""

    name: str
    num_bytes: int
    formula: str = ""
    source: str = ""
    children: tuple["Node", ...] = ()
    stands_out: bool = False
    """It is shown however small it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """Layers that keep the same, and what one of them keeps for the backward pass."""

    name: str
    count: int
    checkpointed: bool
    in_head: bool
    """It is the head, whose bytes count as logits and loss."""
    tensors: tuple[Node, ...]
    """What one keeps, largest first."""
    kept_bytes: int
    """All of it, for one layer."""
    modules: tuple[tuple[str, int], ...] = ()
    """Its attention, its feed-forward network, its norms, and what each keeps of it [bytes]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation(Displayed):
    """Everything that ``memplan explain`` shows."""

    answer: Estimate
    """What is explained."""

    phases: tuple[Node, ...]
    """In order; each split by lifetime, then component."""
    peak: str
    """Name of the fullest one."""
    layers: tuple[LayerKind, ...]
    kept_bytes: int
    """What all layers keep between the passes, as the walk counts it."""

    def rows(self) -> list[dict[str, object]]:
        """Flat rows: every node of every phase, then every layer kind's tensors."""
        return explanation_rows(self)

    def to_dict(self) -> dict[str, object]:
        """The document that ``memplan explain --format json`` writes."""
        from memplan.report.documents import document

        rows = self.rows()
        if self.answer.setup.pipeline is not None:
            from memplan.report.stages import stage_rows  # only where there are any

            rows += stage_rows(self.answer)
        return document(
            rows, schema_version=EXPLAIN_SCHEMA_VERSION, assumptions=self.answer.assumptions
        )


def explain_estimate(found: Estimate) -> Explanation:
    """Take an estimate apart."""
    tape, passes = record_and_walk(found.model, tape_options(found.setup, found.gpu))
    kinds = tuple(layer_kinds(tape, found.model))
    # A pipeline's rank keeps its own stages' share, of several micro-batches.
    of_rank = kinds if found.setup.pipeline is None else ()
    return Explanation(
        answer=found,
        phases=tuple(_phase_node(phase, found, tape, of_rank) for phase in found.account.phases),
        peak=found.peak_phase,
        layers=kinds,
        kept_bytes=passes.after_forward.total_bytes,
    )


def walk_nodes(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """A node and everything below it, with depths."""
    yield depth, node
    for child in node.children:
        yield from walk_nodes(child, depth + 1)


# -- the account ---------------------------------------------------------------------------------


def _phase_node(phase: Phase, found: Estimate, tape: Tape, kinds: Sequence[LayerKind]) -> Node:
    children = []
    for lifetime in Lifetime:
        entries = [each for each in phase.entries if each.kind.lifetime is lifetime]
        if entries:
            children.append(
                Node(
                    name=LIFETIME_WORDS[lifetime],
                    num_bytes=sum(entry.num_bytes for entry in entries),
                    children=tuple(_entry_node(entry, found, tape, kinds) for entry in entries),
                )
            )
    return Node(name=phase.name, num_bytes=phase.peak_bytes, children=tuple(children))


def _entry_node(entry: Entry, found: Estimate, tape: Tape, kinds: Sequence[LayerKind]) -> Node:
    children: tuple[Node, ...] = ()
    if entry.kind is ComponentKind.PARAMETERS:
        children = parameter_nodes(tape)
        if sum(child.num_bytes for child in children) != entry.num_bytes:
            children = ()  # sharded, or held in another format: the engine's figure stands alone
    elif entry.kind in _KEPT_BY:
        children = _kept_parts(entry, kinds)
    return Node(
        name=entry.kind.label.replace("_", " "),
        num_bytes=entry.num_bytes,
        formula=_per_parameter(entry, found),
        source=entry.origin,
        children=children,
    )


def _kept_parts(entry: Entry, kinds: Sequence[LayerKind]) -> tuple[Node, ...]:
    """What layers keep, where all of it is alive, and what is alive beside it for the moment."""
    in_head = _KEPT_BY[entry.kind]
    parts = [
        Node(
            name=_times(kind.name, kind.count),
            num_bytes=kind.count * kind.kept_bytes,
            formula=f"{kind.count} x {kind.kept_bytes:,} B" if kind.count > 1 else "",
            source="tensor by tensor below",
        )
        for kind in kinds
        if kind.in_head is in_head
    ]
    rest = entry.num_bytes - sum(part.num_bytes for part in parts)
    if rest < 0 or not parts:
        return ()  # part of it is gone by then
    if rest:
        parts.append(Node(name="held for the moment", num_bytes=rest))
    return tuple(parts)


_KEPT_BY = {ComponentKind.ACTIVATIONS: False, ComponentKind.LOGITS_AND_LOSS: True}
"""Components that layers keep, and whether it is the head."""

_PER_PARAMETER = {
    ComponentKind.PARAMETERS: "parameters",
    ComponentKind.GRADIENTS: "trained parameters",
    ComponentKind.MASTER_WEIGHTS: "trained parameters",
    ComponentKind.OPTIMIZER_STATES: "trained parameters",
}


def _per_parameter(entry: Entry, found: Estimate) -> str:
    """States as so many bytes for each parameter."""
    if entry.kind not in _PER_PARAMETER:
        return ""
    counted = found.trainable_params
    if entry.kind is ComponentKind.PARAMETERS:
        counted = found.num_params
    if not counted:
        return ""
    each = f"{entry.num_bytes / counted:.3f}".rstrip("0").rstrip(".")
    if each == "0":
        # A scalar for each tensor, not for each parameter.
        return ""
    return f"{each} B x {counted:,} {_PER_PARAMETER[entry.kind]}"


def parameter_nodes(tape: Tape) -> tuple[Node, ...]:
    """Weights by segment, equal layers together; an adapter's apart from the model's own."""
    found = _segment_nodes(tape, of_adapter=False)
    adapter = _segment_nodes(tape, of_adapter=True)
    if not adapter:
        return found
    counts: Counter[DType] = Counter()
    for segment in tape.segments:
        for each in segment.parameters:
            if each.of_adapter:
                counts[each.dtype] += each.numel * segment.num_copies
    whole = Node(
        name="what is trained beside them",
        num_bytes=sum(node.num_bytes for node in adapter),
        formula=" + ".join(
            f"{count:,} x {dtype.num_bytes} B ({dtype.label})" for dtype, count in counts.items()
        ),
        stands_out=True,
        children=adapter,
    )
    return (*found, whole)


def _segment_nodes(tape: Tape, *, of_adapter: bool) -> tuple[Node, ...]:
    found = []
    for segment in tape.segments:
        own = [each for each in segment.parameters if each.of_adapter is of_adapter]
        if own:
            copies = segment.num_copies
            found.append(
                Node(
                    name=_times(segment.name, copies),
                    num_bytes=copies * sum(each.storage.num_bytes for each in own),
                    children=tuple(_parameter_node(each, copies) for each in own),
                )
            )
    return tuple(found)


def _parameter_node(parameter: Parameter, copies: int) -> Node:
    shape = " x ".join(f"{size:,}" for size in parameter.matrix_shape)
    times = f"{copies} x " if copies > 1 else ""
    dtype = parameter.dtype
    formula = f"{times}{shape} x {dtype.num_bytes} B ({dtype.label})"
    if parameter.packed is not None:
        each = parameter.numel * dtype.num_bytes / parameter.num_weights
        formula = f"{times}{shape} x {each:g} B ({parameter.packed.quantization.kind.value} codes)"
    return Node(
        name=parameter.name,
        num_bytes=copies * parameter.storage.num_bytes,
        formula=formula,
    )


def _times(name: str, count: int) -> str:
    return f"{name} x {count}" if count > 1 else name


# -- what a layer keeps --------------------------------------------------------------------------


def layer_kinds(tape: Tape, model: ModelSpec) -> Iterator[LayerKind]:
    """Each kind of layer, embedding and head among them, with what it keeps for backward."""
    names = _SizeNames(tape, model)
    shared = shared_tensors(tape, names)
    if shared:
        yield LayerKind(
            name="what layers share",
            count=1,
            checkpointed=False,
            in_head=False,
            tensors=shared,
            kept_bytes=sum(node.num_bytes for node in shared),
        )
    for segment in tape.segments:
        tensors = kept_tensors(segment, names)
        if tensors:
            yield LayerKind(
                name=segment.name,
                count=segment.repeat,
                checkpointed=segment.checkpointed,
                in_head=segment.component is SegmentComponent.LOGITS_AND_LOSS,
                tensors=tensors,
                kept_bytes=sum(node.num_bytes for node in tensors),
                modules=module_bytes(segment),
            )


ATTENTION, FEED_FORWARD, NORMS = "attention", "feed-forward", "norms"


def module_bytes(segment: Segment) -> tuple[tuple[str, int], ...]:
    """What a layer's modules keep: a tensor is its who keeps it first, as papers count them.

    Nothing for a checkpointed layer, which keeps its input, and for what is no layer.
    """
    if segment.checkpointed or not segment.is_layer:
        return ()
    modules = _modules(segment)
    found: dict[str, int] = {}
    for storage, users in _kept_storages(segment).items():
        if users:
            name = modules[users[0]]
            found[name] = found.get(name, 0) + storage.num_bytes
    return tuple(found.items()) if len(found) > 1 else ()


def _modules(segment: Segment) -> dict[Operation, str]:
    """The module of each operation, by the weights that it or its neighbours read.

    What stands before a norm's weight is the norm's, but for the dropout and the sum that end a block.
    """
    weights: dict[Tensor, Parameter] = {}
    found: dict[Operation, str] = {}
    waiting: list[Operation] = []
    last = ""
    for operation in segment.operations:
        weight = _weight_of(operation, weights)
        if operation.kind is OperationKind.TO and weight is not None:
            weights[operation.outputs[0]] = weight
            waiting.append(operation)
            continue
        if weight is None:
            waiting.append(operation)
            continue
        module = NORMS if weight.role is WeightRole.NORM else _MODULES[weight.block]
        is_ending = module != last and last not in ("", NORMS)
        for each in waiting:
            is_ending = is_ending and (module != NORMS or each.kind in _ENDS_OF_BLOCKS)
            found[each] = last if is_ending else module
        found[operation] = module
        waiting, last = [], module
    return found | dict.fromkeys(waiting, last)


def _weight_of(operation: Operation, copies: dict[Tensor, Parameter]) -> Parameter | None:
    for tensor in operation.inputs:
        weight = tensor if isinstance(tensor, Parameter) else copies.get(tensor)
        if weight is not None:
            return weight
    return None


_ENDS_OF_BLOCKS = frozenset({OperationKind.DROPOUT, OperationKind.ADD})
_MODULES = {
    LayerBlock.ATTENTION: ATTENTION, LayerBlock.CROSS_ATTENTION: "cross-attention",
    LayerBlock.MIXER: "token mixing", LayerBlock.NETWORK: FEED_FORWARD,
    LayerBlock.EXPERTS: "experts", LayerBlock.SHARED_EXPERT: "shared experts",
}  # fmt: skip


def kept_tensors(segment: Segment, names: "_SizeNames") -> tuple[Node, ...]:
    """What one repetition of a segment keeps, largest first; each storage once."""
    kept = _kept_storages(segment)
    nodes: list[Node] = []
    if segment.checkpointed and segment.input is not None:
        for given in (segment.input, *segment.further_inputs):
            nodes.append(
                Node(
                    name="its input",
                    num_bytes=given.storage.num_bytes,
                    formula=names.formula(given),
                    source="checkpointed: everything else is computed again",
                )
            )
            kept.pop(given.storage, None)
    nodes += [_kept_node(storage, users, segment, names) for storage, users in kept.items()]
    return tuple(sorted(_grouped(nodes), key=lambda node: -node.num_bytes))


def shared_tensors(tape: Tape, names: "_SizeNames") -> tuple[Node, ...]:
    """What is made once and kept by later segments: masks, position tables, an encoder's output."""
    own = {storage for segment in tape.segments for storage in _kept_storages(segment)}
    inputs = {given for each in tape.segments if each.checkpointed for given in each.given}
    users: dict[Storage, list[str]] = {}
    for segment in tape.segments:
        later = segment.external_reads if segment.checkpointed else segment.external_saves
        for storage in later:
            if storage not in own | inputs:
                users.setdefault(storage, []).append(segment.name)
    makers = {
        tensor.storage: (tensor, operation)
        for segment in tape.segments
        for operation in segment.operations
        for tensor in operation.outputs
        if tensor.storage in users
    }
    nodes = [
        Node(
            name=_made_by(*makers[storage]),
            num_bytes=storage.num_bytes,
            formula=names.formula(makers[storage][0], _copied_weight(makers[storage][1])),
            source="kept by " + ", ".join(dict.fromkeys(names_of)),
        )
        for storage, names_of in users.items()
        if storage in makers
    ]
    return tuple(sorted(_grouped(nodes), key=lambda node: -node.num_bytes))


def _kept_storages(segment: Segment) -> dict[Storage, list[Operation]]:
    """What stays after the forward pass, and the operations that keep it."""
    dropped = {storage for region in segment.regions for storage in region.dropped}
    kept: dict[Storage, list[Operation]] = {}
    if segment.checkpointed:
        for operation in segment.operations:
            for tensor in operation.outputs:
                if tensor.storage in segment.kept_outputs:
                    kept[tensor.storage] = []
    for operation in segment.operations:
        for storage in dict.fromkeys(operation.held):
            stays = segment.kept_outputs | frozenset(operation.pinned)
            if segment.checkpointed and storage not in stays:
                continue
            if storage not in dropped:
                kept.setdefault(storage, []).append(operation)
    return kept


def _kept_node(
    storage: Storage, users: list[Operation], segment: Segment, names: "_SizeNames"
) -> Node:
    tensor, name, weight = _maker(storage, segment)
    keepers = Counter(operation.name for operation in users)
    because = ", ".join(_times(each, count) for each, count in keepers.items())
    return Node(
        name=name,
        num_bytes=storage.num_bytes,
        formula=names.formula(tensor, weight) if tensor is not None else "",
        source=f"kept by {because}" if because else "the policy does not recompute it",
    )


def _maker(storage: Storage, segment: Segment) -> tuple[Tensor | None, str, Parameter | None]:
    """The tensor on a storage, what to call it, and the weight that it is a copy of."""
    for given in (segment.input, *segment.further_inputs):
        if given is not None and given.storage is storage:
            return given, "its input", None
    for operation in segment.operations:
        for tensor in operation.outputs:
            if tensor.storage is storage:
                return tensor, _made_by(tensor, operation), _copied_weight(operation)
    return None, "an earlier segment's", None


def _copied_weight(operation: Operation) -> Parameter | None:
    weight = (
        operation.inputs[0] if operation.kind is OperationKind.TO and operation.inputs else None
    )
    return weight if isinstance(weight, Parameter) else None


def _made_by(tensor: Tensor, operation: Operation) -> str:
    """A tensor by what made it: ``q_proj``, ``copy in fp32``, ``mul``."""
    weight = next((each for each in operation.inputs if isinstance(each, Parameter)), None)
    if operation.kind is OperationKind.TO:
        return f"copy in {tensor.dtype.label}" if weight is None else "copy of a weight"
    if weight is not None and operation.kind in _NAMED_AFTER_WEIGHTS:
        return weight.name.removesuffix(".weight").rpartition(".")[2]
    if operation.kind in _PLURAL and tensor is not operation.outputs[0]:
        return _PLURAL[operation.kind]
    return operation.name


_NAMED_AFTER_WEIGHTS = {
    OperationKind.LINEAR, OperationKind.GROUPED_MM, *QUANTIZED_PRODUCTS
}  # fmt: skip
_PLURAL = {
    OperationKind.FLASH_ATTENTION: "flash_attention's statistics",
    OperationKind.CUDNN_ATTENTION: "cudnn_attention's statistics",
    OperationKind.EFFICIENT_ATTENTION: "efficient_attention's statistics",
    OperationKind.DROPOUT: "dropout mask",
    OperationKind.LAYER_NORM: "layer_norm's statistics",
    OperationKind.RMS_NORM: "rms_norm's statistics",
    OperationKind.NLL_LOSS: "nll_loss's weight",
}
"""What an operation makes beside its result."""


def _grouped(nodes: Iterable[Node]) -> list[Node]:
    """Equal lines as one, with how many there are."""
    counts = Counter(nodes)
    return [
        node
        if count == 1
        else Node(
            name=_times(node.name, count), num_bytes=count * node.num_bytes,
            formula=f"{count} x {node.formula}", source=node.source,
        )
        for node, count in counts.items()
    ]  # fmt: skip


class _SizeNames:
    """Writes a tensor's size as tokens times a width that has a name."""

    def __init__(self, tape: Tape, model: ModelSpec) -> None:
        options = tape.options
        self.batch = options.batch_size
        self.lengths = dict.fromkeys((options.seq_len, options.target_seq_len))
        self.widths: dict[int, str] = {}
        self.share: tuple[int, int] | None = None
        """A rank's tokens between split blocks, and how many numbers it then has of hidden states."""
        group = options.tensor_parallel
        if group is not None:
            from memplan.graph.local_model import local_model  # only where it is split

            model = local_model(model, options, group)
            self._name(model.vocab_size // group.degree, "of the vocabulary")
            if group.sequence:
                tokens = options.batch_size * options.seq_len // group.degree
                self.share = tokens, tokens * model.hidden_size
        self.heads: dict[int, None] = {}
        for stack in model.stacks:
            for run in stack.runs:
                spec, network = scores_of(run.layer), run.layer.feed_forward
                if spec is not None:
                    self.heads[spec.num_heads] = None
                    self._name(spec.num_heads, "heads")
                    self._name(spec.num_heads * spec.head_dim, "queries")
                    self._name(spec.num_kv_heads * spec.head_dim, "keys")
                if isinstance(network, MixtureSpec):
                    size = network.expert.intermediate_size
                    self._name(network.num_experts_per_token * size, "chosen experts' widths")
                    self._name(network.num_experts, "experts")
                elif isinstance(network, FeedForwardSpec):
                    self._name(network.intermediate_size, "feed-forward")
        self.widths[model.hidden_size] = "hidden"
        self.widths[model.vocab_size] = "vocabulary"

    def _name(self, width: int, name: str) -> None:
        self.widths.setdefault(width, name)

    def formula(self, tensor: Tensor, weight: Parameter | None = None) -> str:
        """``2,048 tokens x 4,096 (hidden) x 2 B (bf16)``; of a ``weight``'s copy the weight's own sizes."""
        size = f"{tensor.dtype.num_bytes} B ({tensor.dtype.label})"
        if weight is not None:
            whole = prod(weight.shape) == tensor.numel
            sizes = (
                " x ".join(f"{each:,}" for each in weight.shape) if whole else f"{tensor.numel:,}"
            )
            return f"{sizes} x {size}"
        if self.share is not None and tensor.numel == self.share[1]:
            tokens, hidden = self.share
            return f"{tokens:,} tokens x {hidden // tokens:,} (hidden) x {size}"
        for length in self.lengths:
            scores = next(
                (heads for heads in self.heads
                 if tensor.numel == self.batch * heads * length * length), None,
            )  # fmt: skip
            if scores is not None and length > 1:
                return f"{self.batch} x {scores} heads x {length:,} x {length:,} x {size}"
            tokens = self.batch * length
            width, rest = divmod(tensor.numel, tokens)
            if not rest and width:
                each = f" x {self._width(width)}" if width > 1 else ""
                return f"{tokens:,} tokens{each} x {size}"
        return f"{tensor.numel:,} x {size}"

    def _width(self, width: int) -> str:
        name = self.widths.get(width)
        return f"{width:,} ({name})" if name else f"{width:,}"


def states_line(found: Estimate) -> str:
    """The formats that parameters, gradients and states are held in."""
    formats = PRECISIONS[found.setup.chosen_precision]
    gradients, states = formats.gradients, formats.optimizer_states
    weights = f"weights {formats.weights.label}"
    if found.setup.adapter is not None:
        frozen, kept = formats.compute, kept_dtype(found.setup)
        weights = f"frozen weights {frozen.label}, trained ones {kept.label}"
        if not formats.master_weights:
            gradients = states = kept
    parts = [weights, f"gradients {gradients.label}", f"optimizer states {states.label}"]
    if formats.master_weights:
        parts.append("master weights fp32")
    return ", ".join(parts)


def explanation_rows(explained: Explanation) -> list[dict[str, object]]:
    """Flat rows: every node of every phase, then every layer kind's tensors."""
    rows: list[dict[str, object]] = []
    for phase in explained.phases:
        path: list[str] = []
        for depth, node in walk_nodes(phase):
            path[depth:] = [node.name]
            rows.append(_node_row("account", path, node))
    for kind in explained.layers:
        for tensor in kind.tensors:
            rows.append(_node_row("kept", [_times(kind.name, kind.count), tensor.name], tensor))
        for name, num_bytes in kind.modules:
            node = Node(
                name=name, num_bytes=num_bytes, formula="", source="what it keeps, together"
            )
            rows.append(_node_row("module", [_times(kind.name, kind.count), name], node))
    return rows


def _node_row(section: str, path: Sequence[str], node: Node) -> dict[str, object]:
    return {
        "section": section,
        "path": "/".join(path),
        "bytes": node.num_bytes,
        "formula": node.formula,
        "source": node.source,
    }
