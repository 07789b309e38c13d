"""Clips compared with texts, as ``XCLIPModel`` of transformers does it."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.compared.projecting import times_weight
from memplan.graph.towers.gridded.nets import drop_path
from memplan.graph.towers.layers import attention, network
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.towers.compared.videos import (
    ClipContrastBody,
    FramesBeginBody,
    FramesEndBody,
    MessageLayerBody,
    PromptLayerBody,
    PromptsBeginBody,
    SeenPatchesBody,
    VideoContrastBody,
)


def write_videos(
    t: Tape, x: Tensor, body: VideoContrastBody, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """The operations of any body of ``memplan.model.towers.compared.videos``."""
    match body:
        case MessageLayerBody():
            return _message_layer(t, x, body, flow)
        case FramesBeginBody():
            flow.items //= body.frames
            flow.past = x
            t.hold(x)
            return t.add(x, t.parameter(body.positions))
        case FramesEndBody():
            return _clip_vector(t, x, body, flow)
        case SeenPatchesBody():
            return _seen_patches(t, body, flow)
        case PromptsBeginBody():
            return _prompts_begin(t, x, body, flow, given)
        case PromptLayerBody():
            return _prompt_layer(t, x, body, flow)
        case ClipContrastBody():
            return _contrast(t, x, body, flow, given)


def _message_layer(t: Tape, x: Tensor, body: MessageLayerBody, flow: Flow) -> Tensor:
    layer, size, frames = body.layer, body.layer.size, flow.items
    names = layer.names
    first = t.slice(x, frames * size)
    message = linear(t, first, "message_fc", size, size, bias=True)
    normed = layer_norm(t, message, body.messages.names.first_norm, size)
    flow.items = frames // body.frames
    told = attention(t, normed, body.messages, flow)
    if layer.drop_path:
        told = drop_path(t, told, flow.items)
    flow.items = frames
    message = t.add(message, told)
    whole = t.concatenate(x, message)
    attended = attention(t, layer_norm(t, whole, names.first_norm, size), layer, flow)
    middle = t.slice(t.add(whole, attended), x.numel)
    normed = layer_norm(t, middle, names.second_norm, size)
    out = t.add(middle, network(t, normed, layer))
    t.touch(message, whole)
    return out


def _clip_vector(t: Tape, x: Tensor, body: FramesEndBody, flow: Flow) -> Tensor:
    assert flow.past is not None
    out = t.mean(t.add(x, flow.past), body.frames)
    t.release(flow.past)
    t.hold(out)
    return out


def _seen_patches(t: Tape, body: SeenPatchesBody, flow: Flow) -> Tensor:
    """``img_features``: of what the tower's last layer gave, all but the first tokens."""
    assert flow.tapped is not None
    tokens = flow.tapped
    patches = t.slice(tokens, tokens.numel - flow.items * body.frames * body.size)
    normed = layer_norm(t, patches, body.norm, body.size)
    made = times_weight(t, normed, t.parameter(body.weight), body.size, body.outputs)
    return t.mean(made, body.frames)


def _prompts_begin(
    t: Tape, x: Tensor, body: PromptsBeginBody, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """``text_embeds.expand(batch_size, -1, -1)``, and the norm on what is seen."""
    flow.memory = layer_norm(t, given["seen"], body.norm, body.size)
    t.hold(flow.memory)
    out = Tensor(flow.items * x.numel, x.dtype, x.storage, requires_grad=x.requires_grad)
    t.record(OperationKind.EXPAND, (x,), (out,), gradients=(Gradient.FRESH,))
    t.hold(x)
    flow.past = out
    return out


def _prompt_layer(t: Tape, x: Tensor, body: PromptLayerBody, flow: Flow) -> Tensor:
    assert flow.memory is not None
    size, heads = body.size, body.num_heads
    normed = layer_norm(t, x, "norm1", size)
    query, key, value = (
        linear(t, read, f"cross_attn.{part}", size, size, bias=False)
        for read, part in ((normed, "q_proj"), (flow.memory, "k_proj"), (flow.memory, "v_proj"))
    )
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=size // heads, causal=False,
        dropout=body.attention_dropout, names_weights=False,
    )  # fmt: skip
    texts, patches = (each.numel // size // flow.items for each in (x, flow.memory))
    seen = attend(t, query, key, value, Shape(flow.items, texts, patches, spec), None)
    given = dropout(t, linear(t, seen, "cross_attn.proj", size, size, bias=True), body.dropout)
    t.touch(query, key, value)
    middle = t.add(x, given)
    raised = linear(t, layer_norm(t, middle, "norm3", size), "mlp.fc1", size, 4 * size, bias=True)
    active = dropout(t, activation(t, raised, body.activation), body.attention_dropout)
    t.touch(raised)
    return t.add(middle, linear(t, active, "mlp.fc2", 4 * size, size, bias=True))


def _contrast(
    t: Tape, x: Tensor, body: ClipContrastBody, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    assert flow.past is not None
    assert flow.memory is not None
    width, clips = body.width, given["mit"]
    texts = t.add(flow.past, t.mul(x, t.parameter(body.share)))
    clips, texts = _unit(t, clips, width), _unit(t, texts, width)
    scale = t.elementwise(OperationKind.EXP, t.parameter(body.scale))
    scaled = t.mul(texts, scale)
    rows = clips.numel // width
    logits = batched_matmul(t, clips, scaled, texts.numel // width, width)
    for each in (flow.memory, flow.past, given["mit"], flow.tapped):
        if each is not None:
            t.release(each)
    t.returned.append(logits)
    for each in (logits, texts):
        t.give_out(each)
    labels = [t.tensor(rows, DType.INT64) for _ in range(2)]
    for each in labels:
        t.record(OperationKind.ARANGE, (), (each,))
    first = cross_entropy(t, logits, labels[0])
    second = cross_entropy(t, t.alias(logits), labels[1])
    return t.scale(t.add(first, second), OperationKind.DIV)


def _unit(t: Tape, x: Tensor, width: int) -> Tensor:
    """Each row over its length, which autocast adds up in fp32."""
    length = t.tensor(x.numel // width, x.dtype if t.autocast is None else DType.FP32)
    t.record(
        OperationKind.VECTOR_NORM, (x,), (length,), saves=(x, length), gradients=(Gradient.FRESH,)
    )
    out = t.tensor(x.numel, length.dtype)
    t.record(
        OperationKind.DIV, (x, length), (out,), saves=(x, length),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return out
