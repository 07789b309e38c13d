"""Experts in fp32, one after another, on the rows of the tokens that chose each.

(transformers 5.23, ``OpenAIPrivacyFilterExperts``, which grouped products do not replace by default.) Every
expert's matrices are copied to fp32 for its product, and the copies kept for backward. How many tokens
choose an expert is decided by data; all are taken as chosen equally often.
"""

from memplan.dtypes import DType
from memplan.graph.experts.in_turn import add_rows
from memplan.graph.experts.routing import take, top_k
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.products import matmul_tensor
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import ExpertShare, Parameter, Tensor
from memplan.model.mixtures import FullPrecisionExpertsSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.units import ceil_div


def full_precision_experts(
    t: Tape, x: Tensor, spec: FullPrecisionExpertsSpec, context: StackContext
) -> Tensor:
    """The router, each expert in turn, their sum times a constant."""
    scores, chosen, logits = _route(t, x, spec, context.hidden_size)
    t.block = LayerBlock.EXPERTS
    out = _experts(t, x, scores, chosen, spec, context.hidden_size)
    t.block = LayerBlock.NETWORK
    scaled = t.scale(out)
    t.touch(out, logits, chosen, x)
    t.linger(scores)
    return scaled


def _route(
    t: Tape, x: Tensor, spec: FullPrecisionExpertsSpec, hidden: int
) -> tuple[Tensor, Tensor, Tensor]:
    """An fp32 product, the largest logits, a softmax of those, divided by how many they are."""
    given = t.cast(x, DType.FP32)
    weight = t.cast(t.parameter("mlp.router.weight", spec.num_experts, hidden), DType.FP32)
    bias = t.cast(
        t.parameter("mlp.router.bias", spec.num_experts, role=WeightRole.OTHER), DType.FP32
    )
    logits = matmul_tensor(t, given, weight, hidden, bias)
    t.touch(bias)
    tokens = given.numel // hidden
    best, chosen = top_k(t, logits, tokens * spec.num_experts_per_token)
    soft = softmax(t, best, in_own_dtype=True)
    scores = t.scale(soft, OperationKind.DIV)
    t.touch(best, soft)
    return scores, chosen, logits


def _experts(
    t: Tape,
    x: Tensor,
    scores: Tensor,
    chosen: Tensor,
    spec: FullPrecisionExpertsSpec,
    hidden: int,
) -> Tensor:
    total = t.tensor(x.numel, DType.FP32)
    t.record(OperationKind.ZEROS, (), (total,))
    mask = _mask(t, chosen, spec)
    stacks = _stacks(t, spec, hidden)
    rows = ceil_div(chosen.numel, spec.num_experts)
    held: dict[str, Tensor] = {}

    def named(name: str, tensor: Tensor) -> Tensor:
        """A variable of the loop holds it until the next turn's is there."""
        if name in held:
            t.touch(held[name])
        held[name] = tensor
        return tensor

    for _ in range(spec.num_experts):
        places, tokens = t.tensor(rows, DType.INT64), t.tensor(rows, DType.INT64)
        t.record(OperationKind.WHERE, (mask,), (places, tokens))
        state = named("state", take(t, x, tokens, rows * hidden))
        full = t.cast(state, DType.FP32)
        both = named("both", _biased(t, full, stacks[:2], spec.num_experts, hidden))
        gated = named("gated", _gated(t, both))
        inner = spec.intermediate_size
        made = named("made", _biased(t, gated, stacks[2:], spec.num_experts, inner))
        weighted = named("weighted", t.mul(made, take(t, scores, places, rows)))
        total = add_rows(t, total, weighted, tokens)
    out = t.cast(total, x.dtype)
    t.touch(total, mask, *held.values())
    return out


def _mask(t: Tape, chosen: Tensor, spec: FullPrecisionExpertsSpec) -> Tensor:
    """``one_hot``: int64 for each expert."""
    equal = t.tensor(chosen.numel * spec.num_experts, DType.BOOL)
    t.record(OperationKind.EQ, (chosen,), (equal,))
    mask = t.tensor(equal.numel, DType.INT64)
    t.record(OperationKind.TO, (equal,), (mask,))
    return mask


def _stacks(t: Tape, spec: FullPrecisionExpertsSpec, hidden: int) -> list[Parameter]:
    """Gate and up with their bias, and what leads back with its own."""
    count, active, inner = spec.num_experts, spec.num_experts_per_token, spec.intermediate_size
    name, fused, plain = "mlp.experts", ExpertShare(count, active, 2), ExpertShare(count, active)
    return [
        t.parameter(f"{name}.gate_up_proj", count, hidden, 2 * inner, experts=fused),
        t.parameter(f"{name}.gate_up_proj_bias", count, 2 * inner, experts=fused),
        t.parameter(f"{name}.down_proj", count, inner, hidden, experts=plain),
        t.parameter(f"{name}.down_proj_bias", count, hidden, experts=plain),
    ]


def _gated(t: Tape, both: Tensor) -> Tensor:
    """Gate and up, both clamped; the gate times its scaled sigmoid, times the other plus one."""
    half = both.numel // 2
    gate, up = t.split(both, half, half)
    gate = t.elementwise(OperationKind.CLAMP, gate)
    up = t.elementwise(OperationKind.CLAMP, up)
    curve = t.elementwise(OperationKind.SIGMOID, t.scale(gate))
    glu = t.mul(gate, curve)
    gated = t.mul(t.shift(up), glu)
    t.touch(gate, up, glu)
    return gated


def _biased(t: Tape, x: Tensor, stacks: list[Parameter], experts: int, width: int) -> Tensor:
    """A product with an fp32 copy of one expert's matrix, plus one of its bias."""
    matrix = t.slice(stacks[0], stacks[0].numel // experts)
    out = matmul_tensor(t, x, t.cast(matrix, DType.FP32), width)
    bias = t.cast(t.slice(stacks[1], stacks[1].numel // experts), DType.FP32)
    summed = t.tensor(out.numel, DType.FP32)
    t.record(OperationKind.ADD, (out, bias), (summed,), gradients=(Gradient.ALIAS, Gradient.SUMMED))
    t.touch(out, bias)
    return summed
