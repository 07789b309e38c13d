"""What models of series compute (transformers 5.23, ``PatchTSTModel``, ``PatchTSMixerModel``)."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.own_ways.turned import copied_linear
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import batch_norm
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.towers.series import (
    ForecastBody,
    SeriesBody,
    SeriesLayerBody,
    SeriesMixerBody,
    SeriesPart,
    SeriesPooling,
    SeriesPositionsBody,
)


def series(t: Tape, body: SeriesBody, flow: Flow) -> Tensor:
    """What is observed, the series less their means over their deviations, a copy in patches: all stay."""
    dtype = DType.FP32 if t.autocast is not None else t.compute
    whole = flow.items * body.length * body.channels
    x = from_batch(t, whole, dtype)
    held = []
    observed = t.tensor(whole, dtype)
    t.record(OperationKind.ONES, (), (observed,))
    held.append(observed)
    if body.scaled:
        moved = t.tensor(whole, dtype)
        t.record(OperationKind.SUB, (x,), (moved,))
        x = t.tensor(whole, dtype)
        t.record(OperationKind.DIV, (moved,), (x,))
        held.append(x)
    out = t.tensor(flow.items * body.channels * body.num_patches * body.patch, dtype)
    t.record(OperationKind.CLONE, (x,), (out,))
    held.append(out)
    for each in held:
        t.hold(each)
    flow.returned += held
    return out


def write_series(t: Tape, x: Tensor, body: SeriesPart, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case SeriesPositionsBody():
            if body.kept:
                t.hold(x)
                flow.returned.append(x)
            return _positions(t, x, body)
        case SeriesLayerBody():
            return _layer(t, x, body, flow)
        case SeriesMixerBody():
            return _mixer(t, x, body, flow)
        case ForecastBody():
            return _forecast(t, x, body, flow)


def _positions(t: Tape, x: Tensor, body: SeriesPositionsBody) -> Tensor:
    name = "positional_encoder"
    table = t.parameter(f"{name}.position_enc")
    rows = table.shape[0]
    given = table if not body.token else t.slice(table, (rows - 1) * body.size)
    out = dropout(t, t.add(x, given), body.dropout)
    if not body.token:
        return out
    number = x.numel // body.size // (rows - 1)
    first = t.add(t.parameter(f"{name}.cls_token"), t.slice(table, body.size))
    everywhere = Tensor(number * body.size, first.dtype, first.storage)
    t.record(OperationKind.EXPAND, (first,), (everywhere,), gradients=(Gradient.FRESH,))
    return t.concatenate(everywhere, out)


def _norm(t: Tape, x: Tensor, name: str, size: int, *, batch: bool) -> Tensor:
    return batch_norm(t, x, name, size) if batch else layer_norm(t, x, name, size)


def _layer(t: Tape, x: Tensor, body: SeriesLayerBody, flow: Flow) -> Tensor:
    series_count = flow.items * body.channels
    out = _attended(t, x, body, "norm_sublayer1", series_count, body.tokens)
    if body.across_channels:
        turned = t.contiguous(out)
        out = _attended(t, turned, body, "norm_sublayer2", flow.items * body.tokens, body.channels)
        out = t.contiguous(out)
    read = out
    if body.norms_first:
        read = _norm(t, out, "norm_sublayer3", body.size, batch=body.batch_norm)
    raised = linear(t, read, "ff.fc1", body.size, body.inner_size, bias=body.bias)
    middle = activation(t, raised, body.activation)
    t.touch(raised)
    middle = dropout(t, middle, body.dropout)
    fed = linear(t, middle, "ff.fc2", body.inner_size, body.size, bias=body.bias)
    t.touch(read)
    out = t.add(out, dropout(t, fed, body.path_dropout))
    if not body.norms_first:
        out = _norm(t, out, "norm_sublayer3", body.size, batch=body.batch_norm)
    return out


def _attended(
    t: Tape, x: Tensor, body: SeriesLayerBody, name: str, batch: int, tokens: int
) -> Tensor:
    """Attention between the tokens of each series, or the series at each token; the sum."""
    first = body.norms_first
    read = _norm(t, x, name, body.size, batch=body.batch_norm) if first else x
    given = _attention(
        t, read, "self_attn", body.size, body.num_heads, body.attention_dropout, batch, tokens
    )  # fmt: skip
    t.touch(read)
    t.linger(given)
    out = t.add(x, dropout(t, given, body.path_dropout))
    return out if first else _norm(t, out, name, body.size, batch=body.batch_norm)


def _attention(
    t: Tape, x: Tensor, name: str, size: int, heads: int, drop: float, batch: int, tokens: int
) -> Tensor:
    t.block = LayerBlock.ATTENTION
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=size // heads, causal=False,
        fp32_softmax=False, dropout=drop, names_weights=True,
    )  # fmt: skip
    shape = Shape(batch, tokens, tokens, spec, heads_split=splits_heads(t, spec))
    made = [
        linear(t, x, f"{name}.{part}", size, size, bias=True)
        for part in ("q_proj", "k_proj", "v_proj")
    ]
    query, key, value = (as_heads(t, each, heads) if shape.heads_split else each for each in made)
    out = attend(t, query, key, value, shape, None)
    out = linear(t, out, f"{name}.o_proj", size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)
    t.touch(query, key, value)
    t.block = LayerBlock.NETWORK
    return out


def _mixer(t: Tape, x: Tensor, body: SeriesMixerBody, flow: Flow) -> Tensor:
    if body.across_channels:
        x = _mixed_channels(t, x, body)
    x = _mixed_patches(t, x, body, flow)
    size = body.size
    normed = _norm(t, x, "feature_mixer.norm", size, batch=body.batch_norm)
    out = _mix(t, normed, "feature_mixer", size, body, turned=False)
    t.touch(normed)
    out = _gate(t, out, "feature_mixer", size, turned=False) if body.gated else out
    return t.add(out, x)


def _mixed_channels(t: Tape, x: Tensor, body: SeriesMixerBody) -> Tensor:
    """The gate comes before the network here."""
    name, width = "channel_feature_mixer", body.channels
    out = _norm(t, x, f"{name}.norm", body.size, batch=body.batch_norm)
    if body.gated:
        out = _gate(t, out, name, width, turned=True)
    mixed = _mix(t, out, name, width, body, turned=True)
    t.touch(out)
    return t.add(mixed, x)


def _mixed_patches(t: Tape, x: Tensor, body: SeriesMixerBody, flow: Flow) -> Tensor:
    name, size, width = "patch_mixer", body.size, body.patches
    normed = _norm(t, x, f"{name}.norm", size, batch=body.batch_norm)
    attended = None
    if body.num_heads:
        attended = _attention(
            t, normed, f"{name}.self_attn_layer", size, body.num_heads, body.dropout,
            flow.items * body.channels, width,
        )  # fmt: skip
        t.linger(attended)
    out = _mix(t, normed, name, width, body, turned=True)
    t.touch(normed)
    if body.gated:
        out = _gate(t, out, name, width, turned=False)
    if attended is not None:
        out = _norm(t, t.add(out, attended), f"{name}.norm_attn", size, batch=body.batch_norm)
    out = t.add(out, x)
    # The block's variables go when it returns, not when the layer does.
    t.touch(*t.segment.lingering)
    t.segment.lingering.clear()
    return out


def _mix(
    t: Tape, x: Tensor, name: str, width: int, body: SeriesMixerBody, *, turned: bool
) -> Tensor:
    """``PatchTSMixerMLP``; rows that lie across are copied, and their bias added apart."""
    inner = width * body.widening
    product = copied_linear if turned else linear
    raised = product(t, x, f"{name}.mlp.fc1", width, inner, bias=True)
    middle = dropout(t, activation(t, raised, Activation.GELU), body.dropout)
    return dropout(t, linear(t, middle, f"{name}.mlp.fc2", inner, width, bias=True), body.dropout)


def _gate(t: Tape, x: Tensor, name: str, width: int, *, turned: bool) -> Tensor:
    """``PatchTSMixerGatedAttention``: times a softmax over what is mixed."""
    product = copied_linear if turned else linear
    scores = product(t, x, f"{name}.gating_block", width, width, bias=True)
    out = t.mul(x, softmax(t, scores))
    t.touch(x)
    return out


def _forecast(t: Tape, x: Tensor, body: ForecastBody, flow: Flow) -> Tensor:
    """Scaled back by each series' own statistics, which are small."""
    each = flow.items * body.channels
    found = x
    match body.pooling:
        case SeriesPooling.FIRST:
            found = t.slice(x, each * body.size)
        case SeriesPooling.MEAN:
            found = t.tensor(each * body.size, x.dtype)
            t.record(OperationKind.MEAN, (x,), (found,), gradients=(Gradient.FRESH,))
        case SeriesPooling.GREATEST:
            found, places = (t.tensor(each * body.size, kind) for kind in (x.dtype, DType.INT64))
            t.record(
                OperationKind.MAX, (x,), (found, places), saves=(places,),
                gradients=(Gradient.FRESH,),
            )  # fmt: skip
        case SeriesPooling.ALL:
            pass
    found = dropout(t, found, body.dropout)
    steps = linear(t, found, body.module, body.features, body.steps, bias=True)
    scale = DType.FP32 if t.autocast is not None else t.compute
    scaled = t.tensor(steps.numel, scale)
    t.record(OperationKind.MUL_SCALAR, (steps,), (scaled,), gradients=(Gradient.FRESH,))
    values = t.shift(scaled)
    t.touch(steps)
    t.returned.append(values)
    t.give_out(values)
    wanted = from_batch(t, values.numel, scale)
    loss = t.tensor(1, values.dtype)
    t.record(
        OperationKind.MSE_LOSS, (values, wanted), (loss,), saves=(values, wanted),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return loss
