"""FLOPs of a training step, by component and by pass, read off the tape.

Only products of matrices are counted, a multiply-add as 2, as every published formula does: what
norms, softmax and activation functions add is below 1 %. Backward, a product costs as much again
for each of its two factors that needs a gradient, so a frozen weight costs half.

Recomputation is counted as papers do: a checkpointed layer is run again in full. What a GPU really
executes differs by two things, given apart: torch stops a recomputation as soon as it has what
backward needs (``torch/utils/checkpoint.py``, early stop), and flash attention's backward kernel
computes the scores again.
"""

from collections.abc import Collection
from enum import Enum
from fractions import Fraction

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import ATTENTION_KERNELS, OUTPUT_LOSSES, OperationKind
from memplan.graph.core.segments import Gradient, Operation, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import LayerSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.model.spec import ModelSpec


class ScoreCount(Enum):
    """Which attention scores are counted."""

    FULL = "full"
    """Every query with every key, as PaLM, torchtitan and Narayanan et al. count."""
    CAUSAL = "causal"
    """Those that the mask lets through: ``s²/2`` of a causal one, as Megatron-LM counts; within a
    window of w, ``sw - w²/2``."""


class FlopsComponent(Enum):
    """What products are for."""

    PROJECTIONS = "query, key, value"
    SCORES = "queries x keys"
    VALUES = "scores x values"
    OUTPUT_PROJECTION = "attention output"
    CROSS_PROJECTIONS = "cross-attention projections"
    CROSS_SCORES = "cross-attention scores"
    TOKEN_MIXING = "token mixing"
    """State spaces, convolutions and attention that is counted as a whole."""
    FEED_FORWARD_UP = "feed-forward up"
    """Into the wide middle; of a gated network both products."""
    FEED_FORWARD_DOWN = "feed-forward down"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    LOGITS = "logits"
    OTHER = "other"
    """Poolers, classifiers, projections of the embedding."""

    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentFlops:
    """One component's share of a step."""

    component: FlopsComponent
    forward: int
    backward: int
    recomputation: int

    @property
    def total(self) -> int:
        """All three."""
        return self.forward + self.backward + self.recomputation


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """FLOPs of one micro-batch through one copy of the model, forward and backward."""

    components: tuple[ComponentFlops, ...]
    """In the order of ``FlopsComponent``; those that the model has."""
    scores: ScoreCount
    """The convention that the figures follow."""
    num_tokens: int
    """Of the micro-batch; an encoder's input and a decoder's target added up."""
    early_stopped: int
    """Of the recomputation: what torch does not run, since nothing after it is needed."""
    kernel_recomputation: int
    """Scores that attention kernels compute again in backward; not part of ``total``."""
    left_out: str = ""
    """Parts of the model whose operations are not written down, and so not counted."""

    @property
    def forward(self) -> int:
        """The forward pass."""
        return sum(each.forward for each in self.components)

    @property
    def backward(self) -> int:
        """The backward pass, recomputation left out."""
        return sum(each.backward for each in self.components)

    @property
    def recomputation(self) -> int:
        """Checkpointed layers' second forward pass."""
        return sum(each.recomputation for each in self.components)

    @property
    def model(self) -> int:
        """Forward and backward: what model FLOPs utilisation (MFU) divides by."""
        return self.forward + self.backward

    @property
    def total(self) -> int:
        """With recomputation: what hardware FLOPs utilisation (HFU) divides by."""
        return self.model + self.recomputation

    @property
    def executed(self) -> int:
        """What the GPU really runs, kernels' own recomputation included."""
        return self.total - self.early_stopped + self.kernel_recomputation


def count_flops(tape: Tape, model: ModelSpec, *, scores: ScoreCount = ScoreCount.FULL) -> StepFlops:
    """Count one micro-batch of a recorded model.

    Equation for GPT-3's shape, a share gamma of its layers recomputed: ``(3 + gamma)·24bsh²L(1 +
    s/(6h)) + 6bshV`` (arXiv:2104.04473), which this gives exactly.
    """
    counter = _Counter(tape, model, scores)
    for segment in tape.segments:
        counter.add(segment)
    return counter.result()


class _Tally:
    __slots__ = ("backward", "forward", "recomputation")

    def __init__(self) -> None:
        self.forward = self.backward = self.recomputation = 0


class _Counter:
    def __init__(self, tape: Tape, model: ModelSpec, scores: ScoreCount) -> None:
        self.tape = tape
        self.model = model
        self.scores = scores
        self.tallies: dict[FlopsComponent, _Tally] = {}
        self.early_stopped = 0
        self.kernel_recomputation = 0
        self.weights: dict[Tensor, Parameter] = {}
        """Weights' copies in another format."""

    def add(self, segment: Segment) -> None:
        again = recomputed_positions(segment)
        stop = early_stop(segment)
        cross = False
        uses, inside = self._uses_of_scores(segment), _Inside()
        for position, operation in enumerate(segment.operations):
            if operation.kind is OperationKind.TO and operation.inputs:
                self._note_copy(operation)
            if not operation.flops:
                inside.pass_on(operation, is_up=False)
                continue
            weight = self._weight(operation)
            if weight is not None:
                cross = weight.block is LayerBlock.CROSS_ATTENTION
            component = self._component(segment, operation, weight, cross=cross)
            if component is FlopsComponent.FEED_FORWARD_UP and inside.reads(operation):
                component = FlopsComponent.FEED_FORWARD_DOWN
            inside.pass_on(operation, is_up=component is FlopsComponent.FEED_FORWARD_UP)
            if component is FlopsComponent.SCORES:
                component = uses[position]
            unit: int | Fraction = operation.flops * segment.repeat
            if component in _SCORES and self.scores is ScoreCount.CAUSAL:
                unit *= causal_share(segment.layer, self.tape, self.model)
            forward, backward = _passes(operation, unit)
            whole = ComponentFlops(
                component=component,
                forward=int(forward),
                backward=int(backward),
                recomputation=int(forward) * _num_reruns(operation, position, again),
            )
            if operation.kind in ATTENTION_KERNELS:
                if operation.gradients:
                    self.kernel_recomputation += int(unit * _score_part(operation))
                if component is FlopsComponent.SCORES:
                    keys = _of_keys(operation, unit, whole)
                    self._note(keys)
                    whole = _rest(whole, keys)
            self._note(whole)
            if position in again and position >= stop:
                self.early_stopped += int(forward)

    def _note(self, found: ComponentFlops) -> None:
        tally = self.tallies.setdefault(found.component, _Tally())
        tally.forward += found.forward
        tally.backward += found.backward
        tally.recomputation += found.recomputation

    def result(self) -> StepFlops:
        options = self.tape.options
        tokens = options.seq_len
        if len(self.model.stacks) > 1:
            tokens += options.target_seq_len
        return StepFlops(
            components=tuple(
                ComponentFlops(
                    component=component,
                    forward=self.tallies[component].forward,
                    backward=self.tallies[component].backward,
                    recomputation=self.tallies[component].recomputation,
                )
                for component in FlopsComponent
                if component in self.tallies
            ),
            scores=self.scores,
            num_tokens=options.batch_size * tokens,
            early_stopped=self.early_stopped,
            kernel_recomputation=self.kernel_recomputation,
            left_out=self.model.activations_left_out.removeprefix("activations of "),
        )

    def _uses_of_scores(self, segment: Segment) -> dict[int, FlopsComponent]:
        """What products without weights make, between two with weights: scores before a softmax, what is
        read with them behind it; without one tokens are mixed in another way."""
        found: dict[int, FlopsComponent] = {}
        before: list[int] = []
        has_softmax = False
        for position, operation in enumerate(segment.operations):
            if operation.kind in _SOFTMAXES:
                found |= dict.fromkeys(before, FlopsComponent.SCORES)
                before, has_softmax = [], True
            elif operation.kind in ATTENTION_KERNELS:
                found[position] = FlopsComponent.SCORES
            elif operation.flops and self._weight(operation) is not None:
                found |= dict.fromkeys(before, FlopsComponent.TOKEN_MIXING)
                before, has_softmax = [], False
            elif operation.flops and has_softmax:
                found[position] = FlopsComponent.VALUES
            elif operation.flops:
                before.append(position)
        return found | dict.fromkeys(before, FlopsComponent.TOKEN_MIXING)

    def _note_copy(self, operation: Operation) -> None:
        """Of a cast, whether it is a weight's."""
        source = operation.inputs[0]
        weight = source if isinstance(source, Parameter) else self.weights.get(source)
        if weight is not None:
            self.weights[operation.outputs[0]] = weight

    def _weight(self, operation: Operation) -> Parameter | None:
        for tensor in operation.inputs:
            weight = tensor if isinstance(tensor, Parameter) else self.weights.get(tensor)
            if weight is not None:
                return weight
        return None

    def _component(
        self, segment: Segment, operation: Operation, weight: Parameter | None, *, cross: bool
    ) -> FlopsComponent:
        if weight is None:
            return FlopsComponent.CROSS_SCORES if cross else FlopsComponent.SCORES
        if segment.part is ModelPart.HEAD:
            made = operation.flops // 2 // max(1, operation.inputs[0].numel)
            is_logits = operation.kind in OUTPUT_LOSSES or made == self.model.vocab_size
            return FlopsComponent.LOGITS if is_logits else FlopsComponent.OTHER
        if not segment.is_layer:
            return FlopsComponent.OTHER
        if weight.block is LayerBlock.ATTENTION and weight.role is WeightRole.ATTENTION_OUTPUT:
            return FlopsComponent.OUTPUT_PROJECTION
        if weight.role is WeightRole.ROUTER:
            return FlopsComponent.ROUTER
        return _COMPONENTS[weight.block]


def causal_share(layer: LayerSpec | None, tape: Tape, model: ModelSpec) -> Fraction:
    """The share of a layer's scores that its mask lets through."""
    if layer is None:
        return Fraction(1)
    attention = layer.attention
    if not isinstance(attention, AttentionSpec | LatentAttentionSpec):
        return Fraction(1)
    spec: AttentionSpec = (
        attention.scores if isinstance(attention, LatentAttentionSpec) else attention
    )
    if not spec.causal:
        return Fraction(1)
    # Only decoders are causal; beside an encoder they read the target.
    options = tape.options
    length = options.seq_len if len(model.stacks) == 1 else options.target_seq_len
    window = min(spec.sliding_window or length, length)
    return Fraction(2 * length * window - window**2, 2 * length**2)


_COMPONENTS = {
    LayerBlock.CROSS_ATTENTION: FlopsComponent.CROSS_PROJECTIONS,
    LayerBlock.ATTENTION: FlopsComponent.PROJECTIONS,
    LayerBlock.MIXER: FlopsComponent.TOKEN_MIXING,
    LayerBlock.SHARED_EXPERT: FlopsComponent.SHARED_EXPERTS,
    LayerBlock.EXPERTS: FlopsComponent.EXPERTS,
    LayerBlock.NETWORK: FlopsComponent.FEED_FORWARD_UP,
}
"""What the products of a block's weights are for."""
_SCORES = frozenset({FlopsComponent.SCORES, FlopsComponent.VALUES})
"""What a causal mask halves."""
_SOFTMAXES = frozenset(
    {OperationKind.SOFTMAX, OperationKind.FUSED_SOFTMAX, OperationKind.SAFE_SOFTMAX}
)


class _Inside:
    """What is made of a network's first product, up to its last one."""

    def __init__(self) -> None:
        self._made: set[Tensor] = set()

    def reads(self, operation: Operation) -> bool:
        """Whether an operation reads such a tensor."""
        return not self._made.isdisjoint(operation.inputs)

    def pass_on(self, operation: Operation, *, is_up: bool) -> None:
        """What an operation makes is inside too, unless it is another product."""
        if is_up or (not operation.flops and self.reads(operation)):
            self._made.update(operation.outputs)


def _num_reruns(operation: Operation, position: int, again: Collection[int]) -> int:
    in_tiles = operation.tiles is not None and operation.tiles.runs_again
    return int(in_tiles) + int(position in again)


def _of_keys(operation: Operation, unit: int | Fraction, whole: ComponentFlops) -> ComponentFlops:
    """What queries times keys are of an attention kernel: the rest is scores times values."""
    part = _score_part(operation)
    forward = int(part * whole.forward)
    needed = _needed(operation) if operation.gradients else [False]
    return ComponentFlops(
        component=FlopsComponent.SCORES,
        forward=forward,
        backward=int(part * unit * sum(needed[:2])),
        recomputation=forward * (whole.recomputation // whole.forward) if whole.forward else 0,
    )


def _rest(whole: ComponentFlops, keys: ComponentFlops) -> ComponentFlops:
    return ComponentFlops(
        component=FlopsComponent.VALUES,
        forward=whole.forward - keys.forward,
        backward=whole.backward - keys.backward,
        recomputation=whole.recomputation - keys.recomputation,
    )


def _passes(operation: Operation, unit: int | Fraction) -> tuple[int | Fraction, int | Fraction]:
    """FLOPs of an operation forward and backward, ``unit`` being what the tape counts."""
    is_loss = operation.kind in OUTPUT_LOSSES
    third = Fraction(unit) / 3 if is_loss else 0
    if not operation.gradients:
        return (third if is_loss else unit), 0
    if is_loss:
        return third, sum(each.requires_grad for each in operation.inputs[:2]) * third
    needed = _needed(operation)
    if operation.kind in ATTENTION_KERNELS:
        return unit, unit * attention_factor(operation, needed)
    return unit, unit * sum(needed[:2])


def _needed(operation: Operation) -> list[bool]:
    """Which inputs' gradients are computed."""
    return [
        tensor.requires_grad and kind != Gradient.NONE
        for tensor, kind in zip(operation.inputs, operation.gradients, strict=True)
    ]


def _score_part(operation: Operation) -> Fraction:
    """What queries times keys are of an attention kernel's two products."""
    _, key, value = operation.inputs[:3]
    return Fraction(key.numel, key.numel + value.numel)


def attention_factor(operation: Operation, needed: list[bool]) -> Fraction:
    """Backward over forward: a product for each gradient, and one for that of the weights."""
    query, key, value = needed[:3]
    scores = _score_part(operation)
    return scores * (query + key) + (1 - scores) * (value + (query or key))


def recomputed_positions(segment: Segment) -> frozenset[int]:
    """Operations of a segment that run a second time, an early stop left out of account."""
    found = {
        position
        for region in segment.regions
        for position in range(region.start, region.stop if region.rerun is None else region.rerun)
    }
    if segment.checkpointed:
        kept = segment.kept_outputs
        found |= {
            position
            for position, operation in enumerate(segment.operations)
            if not any(tensor.storage in kept for tensor in operation.outputs)
        }
    return frozenset(found)


def early_stop(segment: Segment) -> int:
    """The first operation that torch no longer runs again."""
    operations = segment.operations
    if not segment.checkpointed or segment.kept_outputs or segment.nested:
        return len(operations)
    for position in range(len(operations) - 1, -1, -1):
        operation = operations[position]
        if operation.keeps:
            return position + 1 if operation.saves_output else position
    return 0
