"""Tensors that are kept for the backward pass, by name and size."""

from collections import Counter
from math import prod

from memplan.graph.core.operation_kinds import QUANTIZED_PRODUCTS, OperationKind
from memplan.graph.core.segments import Operation, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec
from memplan.report.explained.nodes import PLURAL, Node, grouped, times
from memplan.report.shape import scores_of


def kept_tensors(segment: Segment, names: "SizeNames") -> tuple[Node, ...]:
    """What one repetition of a segment keeps, largest first; each storage once."""
    kept = kept_storages(segment)
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
    return tuple(sorted(grouped(nodes), key=lambda node: -node.num_bytes))


def shared_tensors(tape: Tape, names: "SizeNames") -> tuple[Node, ...]:
    """What is made once and kept by later segments: masks, position tables, an encoder's output."""
    own = {storage for segment in tape.segments for storage in kept_storages(segment)}
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
            formula=names.formula(makers[storage][0], copied_weight(makers[storage][1])),
            source="kept by " + ", ".join(dict.fromkeys(names_of)),
        )
        for storage, names_of in users.items()
        if storage in makers
    ]
    return tuple(sorted(grouped(nodes), key=lambda node: -node.num_bytes))


def kept_storages(segment: Segment) -> dict[Storage, list[Operation]]:
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
    storage: Storage, users: list[Operation], segment: Segment, names: "SizeNames"
) -> Node:
    tensor, name, weight = maker(storage, segment)
    keepers = Counter(operation.name for operation in users)
    because = ", ".join(times(each, count) for each, count in keepers.items())
    return Node(
        name=name,
        num_bytes=storage.num_bytes,
        formula=names.formula(tensor, weight) if tensor is not None else "",
        source=f"kept by {because}" if because else "the policy does not recompute it",
    )


def maker(storage: Storage, segment: Segment) -> tuple[Tensor | None, str, Parameter | None]:
    """The tensor on a storage, what to call it, and the weight that it is a copy of."""
    for given in (segment.input, *segment.further_inputs):
        if given is not None and given.storage is storage:
            return given, "its input", None
    for operation in segment.operations:
        for tensor in operation.outputs:
            if tensor.storage is storage:
                return tensor, _made_by(tensor, operation), copied_weight(operation)
    return None, "an earlier segment's", None


def copied_weight(operation: Operation) -> Parameter | None:
    """The weight that an operation copies, where it does."""
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
    if operation.kind in PLURAL and tensor is not operation.outputs[0]:
        return PLURAL[operation.kind]
    return operation.name


_NAMED_AFTER_WEIGHTS = {
    OperationKind.LINEAR, OperationKind.GROUPED_MM, *QUANTIZED_PRODUCTS
}  # fmt: skip


class SizeNames:
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
            from memplan.graph.splitting.local_model import local_model  # only where it is split

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
