"""What models of one stack and of two have in common: runs of layers, the output matrix, modules."""

from itertools import pairwise

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass, replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.products import linear, matmul_weight
from memplan.model.heads import HeadSpec
from memplan.model.layers import LayerSpec, StackSpec
from memplan.model.parameters import ParameterBlock, WeightRole
from memplan.model.spec import ModelSpec, Task
from memplan.training.choices_of_kernels.kernels import AttentionKernel
from memplan.training.layer_choice import CheckpointedLayers

WHOLE_MODEL = "whole model"
"""The module of the task's class."""
BASE_MODEL = "base model"
"""The one inside it that every task shares."""


def new_tape(model: ModelSpec, options: TapeOptions) -> Tape:
    """An empty tape for a model of transformers, whose class may have eager attention alone."""
    t = Tape(options, source=model.source)
    if model.eager_attention_only and t.kernels.attention is AttentionKernel.SDPA:
        t.kernels = replace(t.kernels, attention=AttentionKernel.EAGER)
    return t


def counted_parts(model: ModelSpec) -> tuple[ParameterBlock, ...]:
    """What is merely counted of the class that the task asks for."""
    if model.task is Task.BASE and model.base_tables is not None:
        return model.base_tables
    return model.tables


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """Equal layers that are also trained in the same way."""

    count: int
    layer: LayerSpec
    checkpointed: bool
    frozen: bool


def split_runs(t: Tape, stack: StackSpec) -> list[TrainedRun]:
    """The stack's runs, cut where checkpointing or freezing begins or ends.

    A share of checkpointed layers means the first ones, as torchtitan counts them.
    """
    options = t.options
    whole = getattr(options.freeze, stack.name)
    recomputed = checkpointed_layers(options.checkpointed_layers, stack.num_layers)
    cuts = {0, stack.num_layers}
    for first, last in recomputed.ranges:
        cuts |= {first, last + 1}
    for first, last in options.freeze.layer_ranges:
        cuts |= {first, last + 1}
    if options.adaptation is not None:
        cuts |= options.adaptation.cuts(f"{stack.name}.layers")
    if options.trained is not None:
        cuts |= options.trained.cuts(f"{stack.name}.layers")
    parts: list[TrainedRun] = []
    start = 0
    for run in stack.runs:
        inside = sorted(_between(cuts, start, start + run.count))
        for low, high in pairwise([start, *inside, start + run.count]):
            frozen = whole or options.freeze.freezes_layer(low)
            checkpointed = low in recomputed
            parts.append(TrainedRun(high - low, run.layer, checkpointed, frozen))
        start += run.count
    return parts


def cut_layers(options: TapeOptions, num_layers: int) -> list[tuple[int, int, bool, bool]]:
    """Stretches of a tower's layers, from and up to, and whether each is checkpointed and frozen."""
    recomputed = checkpointed_layers(options.checkpointed_layers, num_layers)
    cuts = {0, num_layers}
    for first, last in (*recomputed.ranges, *options.freeze.layer_ranges):
        cuts |= {first, last + 1}
    edges = sorted(cut for cut in cuts if 0 <= cut <= num_layers)
    return [
        (low, high, low in recomputed, options.freeze.freezes_layer(low))
        for low, high in pairwise(edges)
    ]


def checkpointed_layers(layers: float | CheckpointedLayers, num_layers: int) -> CheckpointedLayers:
    """Which of a stack's layers are recomputed; a share is of the first ones."""
    if isinstance(layers, CheckpointedLayers):
        return layers
    return CheckpointedLayers.first(round(layers * num_layers))


def _between(cuts: set[int], low: int, high: int) -> list[int]:
    return [cut for cut in cuts if low < cut < high]


def output_matrix(t: Tape, model: ModelSpec, spec: HeadSpec, x: Tensor, table: Parameter) -> Tensor:
    """Hidden states to logits, through the token table where it is tied."""
    width = table.shape[-1]
    if spec.upcast:
        x = t.cast(x, t.compute)
    if spec.tied:
        bias = None
        if spec.bias:
            bias = t.parameter("lm_head.bias", model.vocab_size)
            t.tie(table, "lm_head")
        logits = _through_table(t, x, t.own_copy(table, "lm_head"), bias)
    else:
        logits = linear(
            t, x, "lm_head", width, model.num_outputs, bias=spec.bias, split=Split.VOCABULARY,
            role=WeightRole.OUTPUT,
        )  # fmt: skip
    if spec.softcap:
        whole = logits
        logits = t.scale(t.elementwise(OperationKind.TANH, t.scale(whole)))
        t.touch(*(whole,) * spec.capped_at_once)
    if spec.scaled:
        logits = t.scale(logits)
    return t.cast(logits, DType.FP32) if spec.upcast else logits


def _through_table(t: Tape, x: Tensor, table: Parameter, bias: Parameter | None) -> Tensor:
    group = t.options.tensor_parallel
    if group is None:
        return matmul_weight(t, x, table, bias, module="lm_head")
    from memplan.graph.splitting.tensor_parallel import split_product  # only then

    def product(given: Tensor, num_rows: int) -> Tensor:  # noqa: ARG001  (they are the table's)
        return matmul_weight(t, given, table, bias, module="lm_head")

    num_rows = table.num_weights // table.shape[-1]
    return split_product(t, group, x, Split.VOCABULARY, num_rows, product)
