"""Encoder-decoders on the tape: two stacks, cross attention, the sequence-to-sequence loss.

The decoder reads the encoder's output in every layer, so that output (``memory``) and its gradient
outlive the segments that make and sum them. Its length is ``TapeOptions.target_seq_len``, that of
the labels, which the class shifts right into the decoder's ids.
"""

from collections.abc import Sequence
from typing import Protocol

from memplan.dtypes import DType, promote
from memplan.fast_dataclass import replace
from memplan.graph.attention.head_layout import (
    Shape,
    as_heads,
    keys_as_heads,
    splits_heads,
)
from memplan.graph.attention.masks import attention_masks, spare_mask
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.counted import record_tables
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.graph.stacks import (
    BASE_MODEL,
    WHOLE_MODEL,
    counted_parts,
    new_tape,
    output_matrix,
    split_runs,
)
from memplan.graph.written.layer_parts import feed_forward_of, mix_tokens, whole_layer
from memplan.graph.written.layers import add_residual
from memplan.graph.written.losses import copy_outputs
from memplan.graph.written.stack_forms import settled, share
from memplan.model.attention import (
    AttentionForm,
    AttentionSpec,
    QueryScaling,
)
from memplan.model.layers import EmbeddingSpec, HalfClamp, LayerSpec, NormPlacement, StackSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.model.spec import ModelSpec, Task
from memplan.units import round_up


def record_encoder_decoder(model: ModelSpec, options: TapeOptions) -> Tape:
    """Write the training step of a model of two stacks on a new tape."""
    t = new_tape(model, options)
    if model.tables and model.join is None:
        record_tables(t, counted_parts(model), tied=model.head.tied)
    encoder, decoder = model.stacks
    encoder = settled(encoder, options.seq_len)
    model = replace(model, stacks=(encoder, decoder))
    source, target = options.seq_len, options.target_seq_len
    t.inputs_bytes = sum(
        allocated_bytes(options.batch_size * length, DType.INT64) for length in (source, target)
    )
    context = StackContext(
        hidden_size=model.hidden_size,
        batch=options.batch_size,
        seq_len=round_up(source, encoder.multiple_of),
    )
    table = token_table(t, model, encoder)
    enter_model(t, model)
    memory = record_stack(t, model, encoder, context, stack_table(t, encoder, table))
    memory = _unpadded(t, memory, context, source)
    t.hold(memory)
    context = StackContext(
        hidden_size=model.hidden_size,
        batch=options.batch_size,
        seq_len=target,
        memory=memory,
        memory_len=source,
        memory_cut=round_up(source, encoder.multiple_of) != source,
    )
    begin_embedding(t, decoder)
    if encoder.final_norm is None:
        t.leave(encoder.name)
    ids = t.tensor(options.batch_size * target, DType.INT64)
    t.record(OperationKind.SHIFT_RIGHT, (), (ids,))
    x = record_stack(t, model, decoder, context, stack_table(t, decoder, table), ids)
    head(t, model, x, table)
    t.release(memory)
    return t


def enter_model(t: Tape, model: ModelSpec) -> None:
    """The task's class and the base model in it."""
    t.enter(WHOLE_MODEL)
    if has_base_model(model):
        t.enter(BASE_MODEL)


def has_base_model(model: ModelSpec) -> bool:
    """Whether the task's class holds its stacks in a module of their own."""
    return model.task is not Task.BASE


def begin_embedding(t: Tape, stack: StackSpec) -> None:
    """Start the segment of a stack's embedding."""
    freeze = t.options.freeze
    whole = freeze.encoder if stack.name == "encoder" else freeze.decoder
    t.begin(f"{stack.name}.embed", part=ModelPart.EMBEDDING, frozen=freeze.embeddings or whole)


def token_table(t: Tape, model: ModelSpec, stack: StackSpec) -> Parameter:
    """Begin with the table that both stacks look their tokens up in."""
    begin_embedding(t, stack)
    width = model.hidden_size if stack.embedding is None else stack.embedding.embedding_size
    return t.parameter("shared.weight", model.vocab_size, width, role=WeightRole.TABLE)


def stack_table(t: Tape, stack: StackSpec, shared: Parameter) -> Parameter:
    """The shared table, or the stack's own, beside which the shared one serves nothing."""
    if stack.embedding is None or not stack.embedding.own_table:
        return shared
    shared.unused = True
    return t.parameter("embed_tokens.weight", *shared.shape, role=WeightRole.TABLE)


def record_stack(
    t: Tape,
    model: ModelSpec,
    stack: StackSpec,
    context: StackContext,
    table: Parameter,
    ids: Tensor | None = None,
) -> Tensor:
    """Embedding, layers and final norm of one stack, whose first segment has begun."""
    first = t.segment.index
    t.enter(stack.name)
    spec = stack.embedding or model.stacks[0].embedding
    spec = spec or EmbeddingSpec(embedding_size=model.hidden_size)
    x = embed(t, spec, context, table, ids, model=model, stack=stack)
    if stack.spare_mask:
        context.mask = spare_mask(t, context)
    share(t, stack, context)
    t.end(x)
    for run in split_runs(t, stack):
        t.begin(
            f"{stack.name}.layers",
            part=ModelPart.LAYERS,
            repeat=run.count,
            checkpointed=run.checkpointed,
            frozen=run.frozen,
            x=x,
        )
        t.segment.layer = run.layer
        x = layer(t, x, run.layer, context)
        t.end(x)
    return finish(t, stack, x, context, first)


def embed(
    t: Tape,
    spec: EmbeddingSpec,
    context: StackContext,
    table: Parameter,
    ids: Tensor | None,
    *,
    model: ModelSpec,
    stack: StackSpec,
) -> Tensor:
    """Tokens, scaled, and positions; their sum, norm and dropout.

    What the towers of ``model`` give an encoder, if it has such, is written over the tokens before.
    Masks are made once the tokens are there (``BartDecoder.forward``, ``T5Stack.forward``).
    """
    x = _tokens(t, context, table, ids)
    if spec.scaled:
        x = t.scale(x)
    t.embedded(x, table)
    t.hold(x)
    if ids is None and model.join is not None:
        from memplan.graph.towers.joining import joined_embeddings  # only for Florence-2

        x = joined_embeddings(t, model, counted_parts(model), x, model.join)[0]
    context.mask, _ = attention_masks(t, model, stack, context)
    if spec.num_positions:
        x = t.add(x, positions(t, spec, context))
    if spec.norm is not None:
        x = norm(t, x, spec.norm, "layernorm_embedding", context.hidden_size)
    return dropout(t, x, spec.dropout, module="dropout" if spec.dropout_module else "")


def _tokens(t: Tape, context: StackContext, table: Parameter, ids: Tensor | None) -> Tensor:
    """Rows of the token table; what an encoder pads its sequences with is looked up apart (LED)."""
    length = context.seq_len
    given = min(length, t.options.seq_len if ids is None else length)
    x = embedding_lookup(t, table, context.batch * given, ids)
    if given == length:
        return x
    numbers = t.tensor(context.batch * (length - given), DType.INT64)
    t.record(OperationKind.INDICES, (), (numbers,))
    return t.concatenate(x, embedding_lookup(t, table, numbers.numel, numbers))


def _unpadded(t: Tape, x: Tensor, context: StackContext, length: int) -> Tensor:
    """What the encoder returns, without what it padded."""
    if context.seq_len == length:
        return x
    return t.slice(x, context.batch * length * context.hidden_size)


def positions(t: Tape, spec: EmbeddingSpec, context: StackContext) -> Tensor:
    """Rows of the position table; a variable holds them until the stack is done."""
    rows = context.seq_len * (context.batch if spec.batched_positions else 1)
    numbers = t.tensor(rows, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    table = t.parameter(
        "embed_positions.weight", spec.num_positions, context.hidden_size, role=WeightRole.TABLE
    )
    found = embedding_lookup(t, table, rows, numbers)
    t.hold(found)
    return found


def finish(t: Tape, stack: StackSpec, x: Tensor, context: StackContext, first: int) -> Tensor:
    """The final norm and dropout; then what the stack's variables held is let go."""
    freeze = t.options.freeze
    whole = freeze.encoder if stack.name == "encoder" else freeze.decoder
    if stack.final_norm is not None:
        t.begin(f"{stack.name}.norm", part=ModelPart.NORM, x=x, frozen=freeze.norm or whole)
        x = norm(t, x, stack.final_norm, "final_layer_norm", context.hidden_size)
        t.leave(stack.name)
        t.end(x)
    gone = {storage for segment in t.segments[first:] for storage in segment.releases}
    for segment in t.segments[first:]:
        made = [each for operation in segment.operations for each in operation.outputs]
        for storage in dict.fromkeys(each.storage for each in made if each.storage.held):
            kept = storage is x.storage or any(storage is leaf.storage for leaf in t.leaves)
            if storage.segment == segment.index and not kept and storage not in gone:
                t.segment.releases.append(storage)
    return x


def layer(t: Tape, x: Tensor, spec: LayerSpec, context: StackContext) -> Tensor:
    """Self-attention, cross attention in a decoder, feed-forward."""
    own = whole_layer(t, x, spec, context)
    if own is not None:
        return own
    x = attention_sublayer(t, x, spec, context, cross=False)
    if spec.cross_attention is not None:
        weights, t.segment.lingering = t.segment.lingering, []
        x = attention_sublayer(t, x, spec, context, cross=True, named_weights=weights)
    x = feed_forward_sublayer(t, x, spec, context)
    return x if spec.half_clamp is HalfClamp.NEVER else clamped(t, x)


def clamped(t: Tape, x: Tensor) -> Tensor:
    """Clamp fp16 hidden states: the input is kept, and compared with both bounds in backward."""
    if x.dtype is not DType.FP16:
        return x
    comparisons = 3 if t.decomposed else 2
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.CLAMP, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=comparisons * allocated_bytes(x.numel, DType.BOOL),
    )  # fmt: skip
    return out


def attention_sublayer(
    t: Tape,
    x: Tensor,
    spec: LayerSpec,
    context: StackContext,
    *,
    cross: bool,
    named_weights: Sequence[Tensor] = (),
) -> Tensor:
    """Attention with its norm before (mBART) or after (BART) the residual sum.

    One name takes both attentions' weights: ``named_weights``, of the first one, go when the second
    one's come (transformers 5.23, models/bart, ``BartDecoderLayer.forward``).
    """
    name = "cross_attn_layer_norm" if cross else "self_attn_layer_norm"
    before = spec.placement is NormPlacement.PRE
    normed = norm(t, x, spec.norm, name, context.hidden_size) if before else x
    attended = attention(t, normed, spec, context, cross=cross)
    t.touch(normed)
    t.touch(*named_weights)
    dropped = dropout(t, attended, spec.dropout)
    out = add_residual(t, x, dropped, spec)
    t.touch(x)
    return out if before else _norm_behind(t, x, out, spec, name, context)


def feed_forward_sublayer(t: Tape, x: Tensor, spec: LayerSpec, context: StackContext) -> Tensor:
    """The feed-forward network with its norm before or after the residual sum."""
    before = spec.placement is NormPlacement.PRE
    normed = norm(t, x, spec.norm, "final_layer_norm", context.hidden_size) if before else x
    fed = feed_forward_of(t, normed, spec, context)
    dropped = dropout(t, fed, spec.dropout)
    out = add_residual(t, x, dropped, spec)
    t.touch(x)
    return out if before else _norm_behind(t, x, out, spec, "final_layer_norm", context)


def _norm_behind(
    t: Tape, x: Tensor, summed: Tensor, spec: LayerSpec, name: str, context: StackContext
) -> Tensor:
    """The norm of a sum; what entered the sum is named ``residual`` until the next one is."""
    out = norm(t, summed, spec.norm, name, context.hidden_size)
    t.touch(x)
    return out


def attention(t: Tape, x: Tensor, spec: LayerSpec, context: StackContext, *, cross: bool) -> Tensor:
    """Queries of the stack, keys and values of the stack or of the encoder's output."""
    read, length, name = x, context.seq_len, "self_attn"
    kind = spec.attention
    if cross and spec.cross_attention is not None and context.memory is not None:
        kind, read, length = spec.cross_attention, context.memory, context.memory_len
        name = "cross_attn"
    if not isinstance(kind, AttentionSpec) or kind.form is AttentionForm.PLAIN_SCORES:
        return mix_tokens(t, x, kind, context)
    width, hidden = kind.num_heads * kind.head_dim, context.hidden_size
    t.block = LayerBlock.CROSS_ATTENTION if cross else LayerBlock.ATTENTION
    matched = WeightRole.QUERY_KEY
    product = _products(t, context, cross=cross)
    of_queries = linear if cross else product
    query = of_queries(t, x, f"{name}.q_proj", hidden, width, bias=kind.query_bias, role=matched)
    if kind.query_scaling is QueryScaling.AT_ONCE:
        query = t.scale(query)
    written_out = kind.form is AttentionForm.INTERFACE and splits_heads(t, kind)
    shape = Shape(context.batch, context.seq_len, length, kind, heads_split=written_out)
    if written_out:
        query = as_heads(t, query, kind.num_heads)
    key = product(t, read, f"{name}.k_proj", hidden, width, bias=kind.key_bias, role=matched)
    if written_out:
        key = keys_as_heads(t, key, context.batch)
    value = product(t, read, f"{name}.v_proj", hidden, width, bias=kind.value_bias)
    if written_out:
        value = as_heads(t, value, kind.num_heads)
    mask = None if cross else context.mask
    held: tuple[Tensor, ...] = (query, key, value)
    if kind.form is AttentionForm.FOLDED:
        from memplan.graph.attention.own_ways.folded import folded_attention  # only for LED

        out, held = folded_attention(t, query, key, value, shape, mask)
    else:
        out = attend(t, query, key, value, shape, mask)
    last = WeightRole.ATTENTION_OUTPUT
    out = linear(t, out, f"{name}.o_proj", width, hidden, bias=kind.output_bias, role=last)
    t.block = LayerBlock.NETWORK
    t.touch(*held)
    return out


class Product(Protocol):
    """A linear layer on hidden states."""

    def __call__(
        self,
        t: Tape,
        x: Tensor,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = ...,
        role: WeightRole = ...,
    ) -> Tensor:
        """Write it down."""


def _products(t: Tape, context: StackContext, *, cross: bool) -> Product:
    """How queries, keys and values are projected.

    Keys and values of a part of what the encoder gave copy it, unless autocast does.
    """
    if cross and context.memory_cut and t.autocast is None:
        from memplan.graph.attention.own_ways.turned import (
            turned_linear,  # only for LED and the like
        )

        return turned_linear
    return linear


def head(t: Tape, model: ModelSpec, x: Tensor, table: Parameter) -> None:
    """Logits over the vocabulary, or of classes, and their loss."""
    t.begin("head", part=ModelPart.HEAD, x=x, frozen=t.options.freeze.head)
    if has_base_model(model):
        t.leave(BASE_MODEL)
    decoder = model.stacks[-1]
    if decoder.final_norm is None:
        t.leave(decoder.name)
    loss = x
    if model.task is Task.SEQ2SEQ_LM:
        scaled = t.scale(x) if model.head.scaled else x
        logits = output_matrix(t, model, replace(model.head, scaled=False), scaled, table)
        if model.head.logits_bias:
            logits = biased_logits(t, logits, model.vocab_size)
        loss = cross_entropy(t, t.cast(logits, DType.FP32) if model.head.loss_upcast else logits)
        t.returned.append(logits)
        copy_outputs(t, logits)
        t.touch(scaled, logits)
    t.touch(x)
    t.leave(WHOLE_MODEL)
    t.end(loss)


def biased_logits(t: Tape, logits: Tensor, vocab_size: int) -> Tensor:
    """Add ``final_logits_bias``, a buffer in the model's dtype: fp32 logits under autocast."""
    dtype = promote(logits.dtype, t.options.weights)
    t.hold_buffer(allocated_bytes(vocab_size, t.options.weights))
    out = t.tensor(logits.numel, dtype)
    gradient = Gradient.ALIAS if dtype is logits.dtype else Gradient.FRESH
    t.record(OperationKind.ADD_BUFFER, (logits,), (out,), gradients=(gradient,))
    return out
