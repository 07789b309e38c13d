"""Mixtures of experts, as transformers 5.23 trains them on CUDA.

``integrations/moe.py`` sorts the pairs of token and expert by expert, copies each token's row once
for every expert it goes to, runs all experts' matrices in two grouped products
(``grouped_mm_experts_forward``), weights the rows, puts them back in order and sums each token's.
So most of it has ``tokens x experts per token`` rows, and each layer's experts are two weights.

Routers differ from class to class; ``RouterSpec`` says how.
"""

from memplan.dtypes import DType
from memplan.graph.operations import activation, matmul_weight, softmax
from memplan.graph.tape import ExpertShare, Gradient, Parameter, Tape, Tensor
from memplan.model.spec import MixtureSpec, Normalization, RouterScore

SORTED_INDEX_COPIES = 3
"""int64 copies of the indices inside the kernel that adds rows up by index: linear, sorted, origin
(aten/src/ATen/native/cuda/Indexing.cu, ``index_put_with_sort_kernel``)."""


def mixture(t: Tape, x: Tensor, spec: MixtureSpec, hidden_size: int) -> Tensor:
    """Router, routed experts and, where there is one, the shared expert."""
    if spec.router.jitter:
        x = _jitter(t, x, spec.router.jitter)
    shared = None
    if spec.shared is not None and spec.shared_first:
        shared = _shared(t, x, spec, hidden_size)
    weights, chosen, logits = route(t, x, spec, hidden_size)
    routed = routed_experts(t, x, weights, chosen, spec, hidden_size)
    if spec.routed_scaled:
        routed = t.scale(routed)
    if spec.shared is None:
        t.touch(x, logits, weights, chosen)
        return routed
    if shared is None:
        shared = _shared(t, x, spec, hidden_size)
    if spec.shared_gate:
        shared = _gate_shared(t, x, shared, hidden_size)
    if spec.fp32_sum:
        routed, shared = t.cast(routed, DType.FP32), t.cast(shared, DType.FP32)
    out = t.cast(t.add(routed, shared), x.dtype)
    t.touch(x, routed, shared, logits, weights, chosen)
    return out


def _shared(t: Tape, x: Tensor, spec: MixtureSpec, hidden_size: int) -> Tensor:
    from memplan.graph.blocks import feed_forward  # blocks imports this module when it is needed

    assert spec.shared is not None
    return feed_forward(t, x, spec.shared, hidden_size, "mlp.shared_experts")


def _gate_shared(t: Tape, x: Tensor, shared: Tensor, hidden_size: int) -> Tensor:
    weight = t.parameter("mlp.shared_expert_gate.weight", 1, hidden_size)
    gate = t.elementwise("sigmoid", matmul_weight(t, x, weight), saves_output=True)
    return t.mul(gate, shared)


def _jitter(t: Tape, x: Tensor, times: int) -> Tensor:
    """Multiply by uniform noise, in place: the noise is kept."""
    for _ in range(times):
        noise = t.tensor(x.numel, x.dtype)
        t.record("uniform_", (), (noise,))
        out = t.view(x, x.numel)
        t.record(
            "mul_", (x, noise), (out,), saves=(noise,), gradients=(Gradient.FRESH, Gradient.NONE)
        )
        x = out
    return x


# -- the router ----------------------------------------------------------------------------------


def route(
    t: Tape, x: Tensor, spec: MixtureSpec, hidden_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's experts: their weights, their indices, and the logits, held by the block."""
    router = spec.router
    tokens = x.numel // hidden_size
    count = tokens * spec.num_experts_per_token
    logits = _router_product(t, x, spec, hidden_size)
    if router.score is RouterScore.SPARSE_MIXER:
        weights, chosen = _sparse_mixer(t, logits, tokens, spec.num_experts)
        return weights, chosen, logits
    if router.fp32_logits:
        logits = t.cast(logits, DType.FP32)
    if router.softcap:
        logits = t.scale(t.elementwise("tanh", t.scale(logits), saves_output=True))
    if router.score is RouterScore.SOFTMAX_SELECTED:
        best, chosen = top_k(t, logits, count)
        weights = softmax(t, best)
    else:
        weights, chosen = _scored(t, logits, spec, tokens)
    weights = _normalize(t, weights, tokens, router.normalization)
    if router.scaled:
        weights = t.scale(weights)
    if router.cast_weights:
        weights = t.cast(weights, x.dtype)
    return weights, chosen, logits


def _router_product(t: Tape, x: Tensor, spec: MixtureSpec, hidden_size: int) -> Tensor:
    """The router's linear layer, in fp32 where the class casts for it."""
    router = spec.router
    weight = t.parameter(
        "mlp.gate.weight",
        spec.num_experts,
        hidden_size,
        dtype=DType.FP32 if router.fp32_weight else None,
    )
    bias = t.parameter("mlp.gate.bias", spec.num_experts) if router.bias else None
    if router.correction_parameter:
        t.parameter("mlp.gate.correction.bias", spec.num_experts, trainable=False)
    if not router.fp32_product:
        return matmul_weight(t, x, weight, bias)
    x = t.cast(x, DType.FP32)
    factor: Tensor = t.cast(weight, DType.FP32)
    if t.autocast is not None and not router.fp32_weight:
        x, factor = t.cast(x, t.autocast), _autocast(t, factor)
    tokens = x.numel // hidden_size
    out = t.tensor(tokens * spec.num_experts, x.dtype)
    t.record(
        "linear", (x, factor), (out,), saves=(x, factor),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * tokens * weight.numel,
    )  # fmt: skip
    return out


def _autocast(t: Tape, factor: Tensor) -> Tensor:
    assert t.autocast is not None
    return t.cast_weight(factor) if isinstance(factor, Parameter) else t.cast(factor, t.autocast)


def _scored(
    t: Tape, logits: Tensor, spec: MixtureSpec, tokens: int
) -> tuple[Tensor, Tensor]:
    """Score all experts, then take the best, by the scores themselves or by corrected ones."""
    router = spec.router
    count = tokens * spec.num_experts_per_token
    if router.score is RouterScore.SIGMOID:
        scores = t.elementwise("sigmoid", logits, saves_output=True)
    else:
        scores = softmax(t, logits, dtype=DType.FP32)
    if not router.correction and not router.correction_parameter:
        if router.grouped:
            scores = _rule_out_groups(t, scores)
        weights, chosen = top_k(t, scores, count)
        t.touch(scores)
        return weights, chosen
    corrected = t.tensor(scores.numel, DType.FP32)
    t.record("add", (scores,), (corrected,), gradients=(Gradient.NONE,))
    if router.grouped:
        corrected = _group_choice(t, corrected)
    chosen = t.tensor(count, DType.INT64)
    values = t.tensor(count, corrected.dtype)
    t.record("topk", (corrected,), (values, chosen), gradients=(Gradient.NONE,))
    weights = take(t, scores, chosen, count)
    t.touch(scores, corrected)
    return weights, chosen


def _rule_out_groups(t: Tape, scores: Tensor) -> Tensor:
    """DeepSeek-V2's: scores outside the best groups become zero, with a gradient."""
    mask = t.tensor(scores.numel, DType.BOOL)
    t.record("score_mask", (), (mask,), forward_scratch_bytes=scores.storage.num_bytes)
    out = t.tensor(scores.numel, scores.dtype)
    t.record(
        "masked_fill", (scores, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _group_choice(t: Tape, corrected: Tensor) -> Tensor:
    """DeepSeek-V3's: corrected scores outside the best groups become minus infinity."""
    mask = t.tensor(corrected.numel, corrected.dtype)
    t.record("score_mask", (), (mask,))
    out = t.tensor(corrected.numel, corrected.dtype)
    flags = 2 * t.tensor(corrected.numel, DType.BOOL).storage.num_bytes
    t.record(
        "masked_fill", (corrected, mask), (out,), forward_scratch_bytes=flags,
        gradients=(Gradient.NONE, Gradient.NONE),
    )  # fmt: skip
    t.touch(mask)
    return out


def _normalize(t: Tape, weights: Tensor, tokens: int, kind: Normalization) -> Tensor:
    """Divide each token's weights by their sum: both are kept."""
    if kind is Normalization.NONE:
        return weights
    total = t.tensor(tokens, weights.dtype)
    t.record("sum", (weights,), (total,), gradients=(Gradient.ALIAS,))
    kept = t.tensor(weights.numel, weights.dtype)
    if kind is Normalization.IN_PLACE:
        out = t.view(weights, weights.numel)
        outputs: tuple[Tensor, ...] = (out, kept)
        saves = (kept, total)
    else:
        out = kept
        outputs = (out,)
        saves = (weights, total)
    t.record(
        "div", (weights, total), outputs, saves=saves,
        gradients=(Gradient.FRESH, kept.storage.num_bytes),
        backward_scratch_bytes=2 * kept.storage.num_bytes,
    )  # fmt: skip
    return out


def _sparse_mixer(
    t: Tape, logits: Tensor, tokens: int, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's ``sparsemixer``: two draws, the second without the first one's expert."""
    multipliers: list[Tensor] = []
    draws: list[Tensor] = []
    scores = logits
    for number in range(2):
        if number:
            scores = _without_drawn(t, logits, draws[0])
        multiplier, drawn = _draw(t, logits, scores, tokens, num_experts)
        multipliers.append(multiplier)
        draws.append(drawn)
    weights = t.concatenate(*multipliers)
    chosen = t.concatenate(*draws)
    t.touch(scores)
    return weights, chosen


def _without_drawn(t: Tape, logits: Tensor, drawn: Tensor) -> Tensor:
    out = t.tensor(logits.numel, logits.dtype)
    t.record(
        "scatter", (logits, drawn), (out,), saves=(drawn,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _draw(
    t: Tape, logits: Tensor, scores: Tensor, tokens: int, num_experts: int
) -> tuple[Tensor, Tensor]:
    """One expert for each token, and ``PhimoeMultiplier``'s estimate of its weight."""
    mask = t.tensor(logits.numel, DType.BOOL)
    t.record(
        "sparsity_mask", (scores,), (mask,), gradients=(Gradient.NONE,),
        forward_scratch_bytes=3 * logits.storage.num_bytes,
    )  # fmt: skip
    masked = t.tensor(logits.numel, logits.dtype)
    t.record(
        "masked_fill", (scores, mask), (masked,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    drawn = t.tensor(tokens, DType.INT64)
    t.record(
        "gumbel", (masked,), (drawn,), gradients=(Gradient.NONE,),
        forward_scratch_bytes=3 * logits.storage.num_bytes,
    )  # fmt: skip
    gates = softmax(t, masked)
    taken = take(t, gates, drawn, tokens)
    multiplier = t.tensor(tokens, gates.dtype)
    t.record(
        "multiplier", (logits, taken), (multiplier,), saves=(taken, drawn, gates),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=2 * tokens * num_experts * logits.dtype.num_bytes,
    )  # fmt: skip
    return multiplier, drawn


# -- the routed experts --------------------------------------------------------------------------


def routed_experts(
    t: Tape, x: Tensor, weights: Tensor, chosen: Tensor, spec: MixtureSpec, hidden_size: int
) -> Tensor:
    """``grouped_mm_experts_forward``: sort, copy, two grouped products, weight, put back, sum."""
    rows = chosen.numel
    by_expert, order = t.tensor(rows, DType.INT64), t.tensor(rows, DType.INT64)
    t.record("sort", (chosen,), (by_expert, order))
    sources = t.tensor(rows, DType.INT64)
    t.record("floor_divide", (order,), (sources,))
    selected = take(t, x, sources, rows * hidden_size)
    row_weights = take(t, weights, order, rows)
    offsets = _offsets(t, by_expert, spec.num_experts)
    inner, bias = expert_products(t, selected, offsets, by_expert, spec, hidden_size)
    weighted = t.mul(inner, row_weights)
    inverse = t.tensor(rows, DType.INT64)
    t.record("arange", (), (inverse,), forward_scratch_bytes=inverse.storage.num_bytes)
    ordered = take(t, weighted, inverse, weighted.numel)
    out = sum_of_rows(t, ordered, x.numel)
    result = t.cast(out, x.dtype)
    if bias is not None:
        t.touch(bias)
    t.touch(by_expert, order, selected, row_weights, offsets, inner, inverse, ordered, out)
    return result


def _offsets(t: Tape, by_expert: Tensor, num_experts: int) -> Tensor:
    """Where each expert's rows end."""
    ids = t.tensor(by_expert.numel, DType.INT32)
    t.record("to", (by_expert,), (ids,))
    counts, offsets = t.tensor(num_experts, DType.INT32), t.tensor(num_experts, DType.INT32)
    t.record("histc", (ids,), (counts,))
    t.record("cumsum", (counts,), (offsets,))
    t.touch(ids)
    return offsets


def expert_products(
    t: Tape, x: Tensor, offsets: Tensor, by_expert: Tensor, spec: MixtureSpec, hidden_size: int
) -> tuple[Tensor, Tensor | None]:
    """Every expert's gate and up, activation, and down, on the rows sorted by expert.

    Also returns the rows of the last bias, which the caller's frame still holds.
    """
    inner = spec.expert.intermediate_size
    gated = spec.expert.gated
    name = "mlp.experts.gate_up_proj" if gated else "mlp.experts.up_proj"
    width = 2 * inner if gated else inner
    experts = ExpertShare(spec.num_experts, spec.num_experts_per_token, 2 if gated else 1)
    weight = t.parameter(name, spec.num_experts, width, hidden_size, experts=experts)
    first_bias = _bias_rows(t, by_expert, spec, name, width)
    both = _add_bias(t, grouped_matmul(t, x, weight, offsets), first_bias)
    middle = _expert_activation(t, both, spec)
    t.touch(both)
    name = "mlp.experts.down_proj"
    experts = ExpertShare(spec.num_experts, spec.num_experts_per_token)
    weight = t.parameter(name, spec.num_experts, hidden_size, inner, experts=experts)
    bias = _bias_rows(t, by_expert, spec, name, hidden_size)
    if first_bias is not None:
        t.touch(first_bias)
    return _add_bias(t, grouped_matmul(t, middle, weight, offsets), bias), bias


def _expert_activation(t: Tape, both: Tensor, spec: MixtureSpec) -> Tensor:
    if spec.clamped_gate:
        return clamped_gate(t, both)
    if not spec.expert.gated:
        return activation(t, both, spec.expert.activation)
    gate, up = t.split(both, both.numel // 2, both.numel // 2)
    return t.mul(activation(t, gate, spec.expert.activation), up)


def _bias_rows(
    t: Tape, by_expert: Tensor, spec: MixtureSpec, name: str, width: int
) -> Tensor | None:
    """Each row's own expert's bias, copied out of the table of all experts'."""
    if not spec.expert.bias:
        return None
    experts = ExpertShare(spec.num_experts, spec.num_experts_per_token)
    table = t.parameter(
        f"{name}_bias", spec.num_experts, width, module="mlp.experts", experts=experts
    )
    return take(t, table, by_expert, by_expert.numel * width)


def _add_bias(t: Tape, x: Tensor, bias: Tensor | None) -> Tensor:
    """Add in place: the gradient of both is the output's own."""
    if bias is None:
        return x
    out = t.view(x, x.numel)
    t.record("add_", (x, bias), (out,), gradients=(Gradient.ALIAS, Gradient.ALIAS))
    return out


def grouped_matmul(t: Tape, x: Tensor, weight: Parameter, offsets: Tensor) -> Tensor:
    """``torch.nn.functional.grouped_mm``: autocast does not know it, so it runs in the weight's dtype."""
    x = t.cast(x, weight.dtype)
    _, out_features, in_features = weight.shape
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, weight.dtype)
    saves = [offsets]
    if weight.requires_grad:
        saves.append(x)
    if x.requires_grad:
        saves.append(weight)
    t.record(
        "grouped_mm", (x, weight, offsets), (out,), saves=saves,
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE),
        flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out


def clamped_gate(t: Tape, both: Tensor) -> Tensor:
    """gpt-oss's ``_apply_gate`` on interleaved columns."""
    half = both.numel // 2
    gate = _clamp(t, t.slice(both, half))
    up = _clamp(t, t.slice(both, half))
    curve = t.elementwise("sigmoid", t.scale(gate), saves_output=True)
    glu = t.mul(gate, curve)
    out = t.mul(t.shift(up), glu)
    t.touch(gate, up, glu)
    return out


def _clamp(t: Tape, x: Tensor) -> Tensor:
    return t.elementwise("clamp", x, saves_input=True)


# -- taking and summing rows ---------------------------------------------------------------------


def take(t: Tape, x: Tensor, indices: Tensor, numel: int) -> Tensor:
    """Rows or columns by index: keeps the indices; the gradient is added up in zeros of x's size."""
    out = t.tensor(numel, x.dtype)
    t.record(
        "index", (x, indices), (out,), saves=(indices,),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=_index_scratch_bytes(t, x, indices),
    )  # fmt: skip
    return out


def _index_scratch_bytes(t: Tape, x: Tensor, indices: Tensor) -> int:
    """Beside the gradient: fake tensors add out of place, the CUDA kernel sorts the indices."""
    if t.decomposed:
        return -(-x.numel * x.dtype.num_bytes // 512) * 512
    return SORTED_INDEX_COPIES * indices.storage.num_bytes


def top_k(t: Tape, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and where they are: keeps where."""
    values, indices = t.tensor(count, x.dtype), t.tensor(count, DType.INT64)
    scratch = x.storage.num_bytes if t.decomposed else 0
    t.record(
        "topk", (x,), (values, indices), saves=(indices,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    return values, indices


def sum_of_rows(t: Tape, x: Tensor, numel: int) -> Tensor:
    """Sum each token's rows; backward spreads the gradient and copies it out to every row."""
    rows = t.view(x, x.numel)
    t.record("view", (x,), (rows,), gradients=(Gradient.FRESH,))
    out = t.tensor(numel, x.dtype)
    t.record("sum", (rows,), (out,), gradients=(Gradient.ALIAS,))
    return out


