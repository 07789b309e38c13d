"""A decoder on the tape as Megatron-core runs it: ``GPTModel`` of one tensor-parallel rank.

Megatron-core 0.16.1, core/models/gpt/gpt_model.py, core/transformer/transformer_block.py,
transformer_layer.py, mlp.py. What a model's config says of transformers' own class beyond its sizes is not
looked at; what Megatron has no module for is refused by name.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient
from memplan.graph.core.selective import region_since
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.megatron.attention import core_attention, rotary, split_heads
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.elementwise import activated, bias_dropout_add, swiglu
from memplan.graph.megatron.local_sizes import check_model, local_layer, padded_vocabulary
from memplan.graph.megatron.loss import vocab_parallel_loss
from memplan.graph.megatron.norms import norm
from memplan.graph.megatron.parallel import (
    added_up,
    all_reduced,
    bias_of,
    column_linear,
    row_linear,
    weight_of,
)
from memplan.graph.megatron.recomputation import discard, recompute_since
from memplan.graph.megatron.transformer_engine import fused_attention, linear, norm_linear, turned
from memplan.graph.operations.elementwise import drop, dropout_probability
from memplan.graph.operations.lookups import embedding_backward_scratch
from memplan.graph.stages import hand_on, receive
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, StackSpec
from memplan.model.mixers import TokenMixer
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import ModelPart
from memplan.model.spec import ModelSpec
from memplan.training.splitting.context_parallel import ContextParallelKind
from memplan.training.splitting.megatron import (
    MegatronLayers,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    TransformerImpl,
)
from memplan.training.splitting.parallelism import StagePlace


def record_megatron(model: ModelSpec, options: TapeOptions, settings: MegatronLayers) -> Tape:
    """Write one rank's training step on a new tape.

    Raises ``SetupError`` for a model that Megatron has no modules for, and for a degree that does not
    divide a size, with the arithmetic.
    """
    group = options.tensor_parallel
    degree = 1 if group is None else group.degree
    check_model(model, options, degree=degree, sequence=group is not None and group.sequence)
    t = Tape(options, source=model.source)
    c = _context(t, model, settings)
    stage = options.stage or StagePlace(is_first=True, is_last=True)
    t.inputs = _input_blocks(c)
    stack = model.stacks[0]
    vocabulary = padded_vocabulary(model, settings, degree) // degree
    if stage.is_first:
        x, table = _embed(c, stack, vocabulary)
    else:
        x, table = receive(t, model, stage)
    c.frequencies = _angles(c, stack)
    t.end(x)
    x = _layers(c, model, stack, x, stage)
    if stage.is_last:
        _finish(c, model, x, table, vocabulary)
    else:
        hand_on(t)
    t.buffers_in_use = tuple(c.buffer_bytes)
    return t


def _context(t: Tape, model: ModelSpec, settings: MegatronLayers) -> MegatronContext:
    """What the tape's options say of a rank's share."""
    group, shared = t.options.tensor_parallel, t.options.context_parallel
    degree = 1 if group is None else group.degree
    return MegatronContext(
        tape=t,
        settings=settings,
        degree=degree,
        sequence=group is not None and group.sequence,
        hidden_size=model.hidden_size,
        context=1 if shared is None else shared.degree,
        is_ring=shared is not None and shared.kind is ContextParallelKind.RING,
        experts=t.options.expert_ranks,
        expert_degree=settings.expert_ranks(degree),
        batch=t.options.batch_size,
        seq_len=t.options.seq_len,
    )


def _input_blocks(c: MegatronContext) -> list[int]:
    """Ids, positions, labels and the loss's mask [bytes]; of a pipeline each stage fetches some of them."""
    ids, mask = (c.tape.tensor(c.tokens, dtype) for dtype in (DType.INT64, DType.FP32))
    return [*3 * [ids.storage.num_bytes], mask.storage.num_bytes]


def _finish(
    c: MegatronContext, model: ModelSpec, x: Tensor, table: Parameter, vocabulary: int
) -> None:
    """The final norm, the head and its loss."""
    t, stack = c.tape, model.stacks[0]
    assert stack.final_norm is not None
    t.begin("decoder.final_layernorm", part=ModelPart.NORM, x=x)
    x = norm(c, x, stack.final_norm, "final_layernorm", c.hidden_size)
    t.end(x)
    t.begin("head", part=ModelPart.HEAD, x=x)
    if model.head.tied:
        weight = table
        t.tie(table, "output_layer")
    else:
        weight = weight_of(c, "output_layer", vocabulary, c.hidden_size)
    t.end(vocab_parallel_loss(c, column_linear(c, x, weight)))


def _embed(c: MegatronContext, stack: StackSpec, rows: int) -> tuple[Tensor, Parameter]:
    """This rank's rows of the token table, what it has not set to zero; learned positions; dropout.

    With sequence parallelism the sum over ranks is scattered at once, or, with learned positions, cut
    and copied (``VocabParallelEmbedding``, ``LanguageModelEmbedding``).
    """
    t = c.tape
    spec = stack.embedding
    assert spec is not None
    t.begin("embedding", part=ModelPart.EMBEDDING)
    table = weight_of(c, "embedding.word_embeddings", rows, c.hidden_size)
    rotates = _rotary_dim(stack)
    x = _looked_up(c, table)
    if c.sequence and rotates:
        x = added_up(c, _rows_turned(c, x))
    else:
        x = all_reduced(c, x)
        if not rotates:
            x = _with_positions(c, x, spec)
        x = _rows_turned(c, x)
        if c.sequence:
            # A slice, cloned lest it hold the whole; its gradient is gathered.
            part = t.tensor(x.numel // c.degree, x.dtype)
            t.record(OperationKind.CLONE, (x,), (part,), gradients=(Gradient.FRESH,))
            x = part
    if dropout_probability(t, spec.dropout) > 0.0:
        x = drop(t, x)
    return x, table


def _angles(c: MegatronContext, stack: StackSpec) -> Tensor | None:
    """Of every position, in fp32: the rotary module remembers them, beside its frequencies."""
    rotates = _rotary_dim(stack)
    if not rotates:
        return None
    c.tape.buffer(rotates // 2, DType.FP32)
    return c.tape.buffer(c.seq_len * rotates, DType.FP32)


def _rotary_dim(stack: StackSpec) -> int:
    """Dimensions of a head that are turned; 0 where positions are learned."""
    for run in stack.runs:
        spec = run.layer.attention
        if isinstance(spec, AttentionSpec | LatentAttentionSpec) and spec.rotary is not None:
            return spec.rotary.dim
    return 0


def _looked_up(c: MegatronContext, table: Parameter) -> Tensor:
    """Rows of the table for ids that are this rank's own, zeros for the others; added up over ranks."""
    t = c.tape
    width = c.hidden_size
    out = t.tensor(c.tokens * width, c.dtype)
    foreign = t.tensor(c.tokens, DType.BOOL)
    ids: tuple[Tensor, ...] = ()
    if c.degree > 1:
        ids = (t.tensor(c.tokens, DType.INT64),)
        t.record(OperationKind.INDICES, (), (foreign, *ids))
    scratch = embedding_backward_scratch(t, c.tokens, table.numel, width, table.dtype)
    t.record(
        OperationKind.EMBEDDING, (table, *ids), (out,), saves=ids,
        gradients=(Gradient.FRESH, Gradient.NONE)[: 1 + len(ids)], backward_scratch_bytes=scratch,
    )  # fmt: skip
    if c.degree == 1:
        return out
    zeroed = t.view(out, out.numel)
    t.record(
        OperationKind.MASKED_FILL_IN_PLACE, (out, foreign), (zeroed,), saves=(foreign,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return zeroed


def _with_positions(c: MegatronContext, x: Tensor, spec: EmbeddingSpec) -> Tensor:
    """Learned positions of every sequence, looked up in a table that is whole on each rank."""
    t = c.tape
    table = t.parameter("embedding.position_embeddings.weight", spec.num_positions, c.hidden_size)
    scratch = embedding_backward_scratch(t, c.tokens, table.numel, c.hidden_size, table.dtype)
    rows = t.tensor(x.numel, c.dtype)
    t.record(
        OperationKind.EMBEDDING, (table,), (rows,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    out = t.add(x, rows)
    t.touch(x, rows)
    return out


def _rows_turned(c: MegatronContext, x: Tensor) -> Tensor:
    """``transpose(0, 1).contiguous()``: nothing to do for one sequence."""
    return x if c.batch == 1 else c.tape.contiguous(x)


# -- layers --------------------------------------------------------------------------------------------


def _layers(
    c: MegatronContext, model: ModelSpec, stack: StackSpec, x: Tensor, stage: StagePlace
) -> Tensor:
    """Runs of equal layers; where whole ones are recomputed, a chunk of them is one stretch.

    Of a pipeline's stage the first and the last stretch stand apart: one reads what was received, the
    other makes what is sent.
    """
    layers = [run.layer for run in stack.runs for _ in range(run.count)]
    start = 0
    while start < len(layers):
        chunk, recomputed = _chunk(c.settings, len(layers), start)
        specs = layers[start : start + chunk]
        repeat = 1
        while _continues(c.settings, layers, start, chunk, repeat):
            if start == 0 and not stage.is_first:
                break
            if start + chunk * (repeat + 1) == len(layers) and not stage.is_last:
                break
            repeat += 1
        x = _segment(c, model, specs, x, repeat=repeat, recomputed=recomputed)
        start += chunk * repeat
    return x


def _chunk(settings: MegatronLayers, num_layers: int, start: int) -> tuple[int, bool]:
    """Layers from ``start`` on that are one stretch, and whether it is recomputed."""
    if settings.recompute_granularity is not RecomputeGranularity.FULL:
        return 1, False
    if settings.recompute_method is RecomputeMethod.BLOCK:
        return 1, start < settings.recompute_num_layers
    return min(settings.recompute_num_layers, num_layers - start), True


def _continues(
    settings: MegatronLayers, layers: list[LayerSpec], start: int, chunk: int, repeat: int
) -> bool:
    """Whether the next stretch is like those before."""
    after = start + chunk * repeat
    if after + chunk > len(layers):
        return False
    same = layers[after : after + chunk] == layers[start : start + chunk]
    return same and _chunk(settings, len(layers), after) == _chunk(settings, len(layers), start)


def _segment(
    c: MegatronContext,
    model: ModelSpec,
    specs: list[LayerSpec],
    x: Tensor,
    *,
    repeat: int,
    recomputed: bool,
) -> Tensor:
    t = c.tape
    t.begin("decoder.layers", part=ModelPart.LAYERS, repeat=repeat, checkpointed=recomputed, x=x)
    t.segment.layer = specs[0]
    t.segment.nested = recomputed
    for number, spec in enumerate(specs):
        prefix = f"{number}." if len(specs) > 1 else ""
        x = _layer(c, local_layer(model, spec, c.degree, c.expert_degree), x, prefix)
    t.end(x)
    return x


def _layer(c: MegatronContext, layer: LayerSpec, x: Tensor, prefix: str) -> Tensor:
    """Norm, attention, sum; norm, network, sum."""
    t = c.tape
    attention, network = layer.attention, layer.feed_forward
    attended, bias, frame = _mixed(c, layer, attention, x, prefix)
    pair, frame = (frame[-1], frame[:-1]) if _shares_pairs(c) else (None, frame)
    dropout = layer.attention_output_dropout
    middle = bias_dropout_add(c, attended, bias, x, dropout)
    t.touch(*frame, attended)
    fed, bias, frame = _fed(c, layer, network, middle, prefix, pair)
    out = bias_dropout_add(c, fed, bias, middle, layer.feed_forward_output_dropout)
    t.touch(*frame, fed, middle)
    return out


Written = tuple[Tensor, Parameter | None, tuple[Tensor, ...]]
"""A part's result, a bias that is still to be added, and what the layer's variables hold meanwhile."""


def _mixed(
    c: MegatronContext, layer: LayerSpec, spec: TokenMixer, x: Tensor, prefix: str
) -> Written:
    if isinstance(spec, AttentionSpec):
        return _attention(c, layer, spec, x, prefix)
    from memplan.graph.megatron.latent import latent_attention  # only for DeepSeek's kin

    assert isinstance(spec, LatentAttentionSpec)
    out, frame = latent_attention(c, x, spec, layer.norm, prefix)
    return out, None, frame


def _fed(
    c: MegatronContext,
    layer: LayerSpec,
    spec: object,
    x: Tensor,
    prefix: str,
    pair: Tensor | None,
) -> Written:
    if isinstance(spec, FeedForwardSpec):
        return _network(c, layer, spec, x, prefix, pair)
    from memplan.graph.megatron.mixture import mixture  # only for mixtures

    assert isinstance(spec, MixtureSpec)
    out, frame = mixture(c, x, spec, layer.norm, prefix)
    return out, None, frame


def _attention(
    c: MegatronContext, layer: LayerSpec, spec: AttentionSpec, x: Tensor, prefix: str
) -> Written:
    t, name = c.tape, f"{prefix}self_attention"
    width = spec.num_heads * spec.head_dim
    proj = weight_of(c, f"{name}.linear_proj", c.hidden_size, width)
    proj_bias = (
        bias_of(c, f"{name}.linear_proj", c.hidden_size, ranks=1) if spec.output_bias else None
    )
    columns = width + 2 * spec.num_kv_heads * spec.head_dim
    weight = weight_of(c, f"{name}.linear_qkv", columns, c.hidden_size)
    bias = bias_of(c, f"{name}.linear_qkv", columns, ranks=c.degree) if spec.query_bias else None
    if _shares_pairs(c):
        return _kwai_attention(c, layer, spec, x, prefix, (weight, proj))
    first = len(t.segment.operations)
    normed, mixed = _into_columns(
        c, x, layer, f"{prefix}input_layernorm", f"{name}.linear_qkv", weight, bias
    )
    split = query, key, value = split_heads(c, mixed, spec)
    by_engine = _by_engine(c)
    is_fused = c.settings.transformer_impl is not TransformerImpl.LOCAL
    if spec.rotary is not None:
        turn = turned if is_fused else rotary
        query, key = turn(c, query), turn(c, key)
    start = len(t.segment.operations)
    scores = fused_attention if is_fused else core_attention
    out = scores(c, query, key, value, spec)
    if c.settings.recomputes(RecomputeModule.CORE_ATTN):
        recompute_since(c, start, (query, key, value))
    projected = linear(c, out, proj) if by_engine else row_linear(c, out, proj)
    # ``qkv_output`` names them as they were split, too.
    t.touch(*split, query, key, value, out)
    return projected, proj_bias, _discarded_norm(c, first, normed)


def _shares_pairs(c: MegatronContext) -> bool:
    """Whether keys and values gathered for attention are let go behind the network (``dattention``)."""
    return c.settings.transformer_impl is TransformerImpl.KWAI and c.context > 1


def _kwai_attention(
    c: MegatronContext,
    layer: LayerSpec,
    spec: AttentionSpec,
    x: Tensor,
    prefix: str,
    weights: tuple[Parameter, Parameter],
) -> Written:
    """Behind the frame's own tensors the keys and values of all ranks."""
    from memplan.graph.megatron.kwai import gathered, gathered_attention, row_product

    t = c.tape
    start = len(t.segment.operations)
    normed = norm(c, x, layer.norm, f"{prefix}input_layernorm", c.hidden_size)
    columns, rows = weights
    query, pair = gathered(c, normed, columns)
    _recompute_into_product(c, start, RecomputeModule.LAYERNORM)
    out, query, pair = gathered_attention(c, query, pair, spec)
    projected = row_product(c, out, rows)
    t.touch(query, pair, out)
    frame = () if c.settings.recomputes(RecomputeModule.LAYERNORM) else (normed,)
    return projected, None, (*frame, pair)


def _recompute_into_product(c: MegatronContext, start: int, module: RecomputeModule) -> None:
    """Drop what a product reads, and compute it again before the product's backward formula."""
    if not c.settings.recomputes(module):
        return
    segment = c.tape.segment
    found = region_since(segment, start)
    before = {tensor.storage for each in segment.operations[:start] for tensor in each.outputs}
    segment.regions.append(
        replace(found, dropped=found.dropped - before, rerun=len(segment.operations) - 1)
    )


def _network(
    c: MegatronContext,
    layer: LayerSpec,
    spec: FeedForwardSpec,
    x: Tensor,
    prefix: str,
    pair: Tensor | None,
) -> Written:
    t, name = c.tape, f"{prefix}mlp"
    width = spec.intermediate_size
    columns = 2 * width if spec.gated else width
    up = weight_of(c, f"{name}.linear_fc1", columns, c.hidden_size)
    up_bias = bias_of(c, f"{name}.linear_fc1", columns, ranks=c.degree) if spec.bias else None
    down = weight_of(c, f"{name}.linear_fc2", c.hidden_size, width)
    down_bias = bias_of(c, f"{name}.linear_fc2", c.hidden_size, ranks=1) if spec.bias else None
    first = len(t.segment.operations)
    normed, wide = _into_columns(
        c, x, layer, f"{prefix}pre_mlp_layernorm", f"{name}.linear_fc1", up, None
    )
    start = first + (not _by_engine(c))
    if c.settings.transformer_impl is TransformerImpl.KWAI:
        return _kwai_down(c, wide, down, pair), down_bias, normed
    active = swiglu(c, wide) if spec.gated else activated(c, wide, up_bias, spec.activation)
    fed = linear(c, active, down) if _by_engine(c) else row_linear(c, active, down)
    t.touch(wide, active)
    if c.settings.recomputes(RecomputeModule.MLP):
        recompute_since(c, start, normed or (x,))
    return fed, down_bias, _discarded_norm(c, first, normed)


def _discarded_norm(
    c: MegatronContext, start: int, normed: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """What the layer holds of a norm's result, of which a recomputed one is let go here."""
    if not normed or not c.settings.recomputes(RecomputeModule.LAYERNORM):
        return normed
    discard(c, start, start + 1, normed)
    return ()


def _kwai_down(c: MegatronContext, wide: Tensor, down: Parameter, pair: Tensor | None) -> Tensor:
    """Gate and second product, which may compute the gate again itself."""
    from memplan.graph.megatron.kwai import gate, row_product, shard_saved

    t = c.tape
    start = len(t.segment.operations)
    active = gate(c, wide)
    fed = row_product(c, active, down)
    _recompute_into_product(c, start, RecomputeModule.MLP_ACT)
    if pair is not None:
        fed = shard_saved(c, fed, pair)
        t.touch(pair)
    t.touch(wide, active)
    return fed


def _by_engine(c: MegatronContext) -> bool:
    return c.settings.transformer_impl is TransformerImpl.TRANSFORMER_ENGINE


def _into_columns(
    c: MegatronContext,
    x: Tensor,
    layer: LayerSpec,
    norm_name: str,
    name: str,
    weight: Parameter,
    bias: Parameter | None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A norm and a column-parallel product: two modules, whose caller has a name for what is between
    them, or TransformerEngine's one."""
    if _by_engine(c):
        return (), norm_linear(c, x, layer.norm, name, weight, bias)
    start = len(c.tape.segment.operations)
    normed = norm(c, x, layer.norm, norm_name, c.hidden_size)
    product = column_linear(c, normed, weight, bias)
    if c.settings.transformer_impl is TransformerImpl.KWAI:
        _recompute_into_product(c, start, RecomputeModule.LAYERNORM)
        # What is computed again is let go at once, and no frame's.
        if c.settings.recomputes(RecomputeModule.LAYERNORM):
            return (), product
    return (normed,), product
