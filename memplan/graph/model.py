"""A whole model on the tape: embedding, runs of layers, final norm, head and loss."""

from dataclasses import replace
from itertools import pairwise

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.graph.blocks import DIRECT_FORMS, StackContext, decoder_layer
from memplan.graph.embeddings import module_embeddings
from memplan.graph.heads import (
    WHOLE_SEQUENCES,
    base_parts,
    classification,
    masked_lm,
    replaced_tokens,
)
from memplan.graph.losses import GRADIENTS_IN_FORWARD, language_model_loss
from memplan.graph.masks import additive_mask, causal_pattern, sliding_pattern, two_sided_pattern
from memplan.graph.operations import (
    complex_tables,
    cross_entropy,
    dropout,
    embedding,
    embedding_lookup,
    linear,
    matmul_weight,
    norm,
    rotary_tables,
)
from memplan.graph.options import TapeOptions
from memplan.graph.positions import decoder_embeddings
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.attention import AttentionForm, AttentionSpec, PositionBias, RotarySpec
from memplan.model.heads import HeadSpec
from memplan.model.layers import LayerSpec, StackSpec
from memplan.model.parameters import ParameterBlock
from memplan.model.spec import ModelSpec, Task
from memplan.training.freezing import ALL_LAYERS, FrozenParts
from memplan.training.kernels import AttentionKernel

ALIBI_FORMS = frozenset({AttentionForm.ALIBI_PRODUCT, AttentionForm.ALIBI_SUM})
"""Attention that adds a bias made for the whole stack."""
WHOLE_MODEL = "whole model"
"""The module of the task's class."""
BASE_MODEL = "base model"
"""The one inside it that every task shares."""
CLASSIFICATION_TASKS = frozenset(
    {*WHOLE_SEQUENCES, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING}
)
"""Tasks whose logits are of classes, not of tokens."""


def record_model(model: ModelSpec, options: TapeOptions) -> Tape:
    """Write the model's training step on a new tape."""
    tape = _record(model, options)
    tape.declared = model.declared
    return tape


def _check_frozen(model: ModelSpec, freeze: FrozenParts) -> None:
    """Refuse layers and stacks to freeze that the model does not have."""
    for name in ("encoder", "decoder"):
        if getattr(freeze, name) and all(stack.name != name for stack in model.stacks):
            msg = f"freeze: {name}: {model.name} has none"
            raise SetupError(msg)
    depth = max((stack.num_layers for stack in model.stacks), default=0)
    for first, last in freeze.layer_ranges:
        if first >= depth or depth <= last < ALL_LAYERS:
            msg = f"freeze: layers.{first}-{last}: {model.name} has {depth} layers, counted from 0"
            raise SetupError(msg)


def _record(model: ModelSpec, options: TapeOptions) -> Tape:
    _check_frozen(model, options.freeze)
    if len(model.stacks) > 1:
        from memplan.graph.encoder_decoder import record_encoder_decoder  # only for two stacks

        return record_encoder_decoder(model, options)
    if options.checkpointed_layers and not model.recomputes:
        msg = f"{model.source}: the class of {model.family} cannot checkpoint its activations"
        raise SetupError(msg)
    t = Tape(options, source=model.source)
    if model.eager_attention_only and t.kernels.attention is AttentionKernel.SDPA:
        t.kernels = replace(t.kernels, attention=AttentionKernel.EAGER)
    if model.tables:
        from memplan.graph.tables import record_tables  # only for parts that are merely counted

        record_tables(t, counted_parts(model), tied=model.head.tied)
        if not model.stacks:
            return t
    t.inputs_bytes = _ids(t, options.batch_size * options.seq_len) + _label_bytes(t, model)
    stack = model.stacks[0]
    x, table = embed(t, model, stack)
    context = shared_tensors(t, model, stack)
    x = run_layers(t, stack, x, context)
    x = finish_stack(t, stack, x, context)
    head(t, model, x, table)
    return t


def counted_parts(model: ModelSpec) -> tuple[ParameterBlock, ...]:
    """What is merely counted of the class that the task asks for."""
    if model.task is Task.BASE and model.base_tables is not None:
        return model.base_tables
    return model.tables


def _label_bytes(t: Tape, model: ModelSpec) -> int:
    """Labels of the batch: one a token, one a sequence, or a span's two ends [bytes]."""
    batch = t.options.batch_size
    if model.task in WHOLE_SEQUENCES:
        return _ids(t, batch)
    if model.task is Task.QUESTION_ANSWERING:
        return 2 * _ids(t, batch)
    return _ids(t, batch * t.options.seq_len)


def _ids(t: Tape, count: int) -> int:
    return t.tensor(count, DType.INT64).storage.num_bytes


def embed(t: Tape, model: ModelSpec, stack: StackSpec) -> tuple[Tensor, Parameter]:
    """Token, position and type embeddings, their sum, norm and dropout."""
    spec = stack.embedding
    assert spec is not None
    tokens = t.options.batch_size * t.options.seq_len
    t.begin("embed", frozen=t.options.freeze.embeddings)
    t.enter(WHOLE_MODEL)
    if model.task is not Task.BASE:
        t.enter(BASE_MODEL)
    if spec.own_module:
        return module_embeddings(t, model, spec)
    rows = model.vocab_size + spec.extra_rows
    if spec.prompts is not None:
        rows += spec.prompts.num_types * spec.prompts.length
    table = t.parameter("embed_tokens.weight", rows, spec.embedding_size)
    if spec.prompts is not None:
        from memplan.graph.prompts import prompted_embeddings  # only for CPM-Ant

        return prompted_embeddings(t, model, table, spec.prompts)
    if spec.patch_features:
        shape = model.hidden_size, spec.patch_features
        t.parameter("vision_embed_tokens.weight", *shape).unused = True
        t.parameter("vision_embed_tokens.bias", model.hidden_size).unused = True
    x = embedding_lookup(t, table, tokens)
    if spec.position_source is not None:
        return decoder_embeddings(t, model, spec, x), table
    if spec.unscaled_held:
        t.hold(x)
    if spec.scaled:
        x = t.scale(x)
    if not spec.unscaled_held:
        t.hold(x)
    if spec.num_positions:
        rows = t.options.seq_len
        positions = t.tensor(rows, DType.INT64)
        t.record("arange", (), (positions,))
        t.hold(positions)
        added = embedding(
            t, "embed_positions", spec.num_positions, model.hidden_size, rows, positions
        )
        x = t.add(x, added)
    if spec.norm is not None:
        x = norm(t, x, spec.norm, "embed_norm", model.hidden_size)
    x = dropout(t, x, spec.dropout, module="dropout" if spec.dropout_module else "")
    return x, table


def shared_tensors(t: Tape, model: ModelSpec, stack: StackSpec) -> StackContext:
    """Position tables and masks, made once and read by every layer."""
    context = StackContext(
        hidden_size=model.hidden_size,
        batch=t.options.batch_size,
        seq_len=t.options.seq_len,
    )
    prompts = stack.embedding.prompts if stack.embedding is not None else None
    if prompts is not None:
        from memplan.graph.prompts import add_segment_bias  # only for CPM-Ant

        context.seq_len += prompts.length
        add_segment_bias(t, stack, prompts, context)
        return context
    context.mask, context.sliding_mask = attention_masks(t, model, stack, context)
    rotary = _first_rotary(stack)
    if rotary is not None:
        tables = complex_tables if rotary.complex_numbers else rotary_tables
        positions = context.seq_len
        if rotary.sections:
            from memplan.graph.rotary import sectioned_tables  # only for Qwen3.5

            tables, positions = sectioned_tables, positions * context.batch
        dtype = DType.FP32 if rotary.full_tables else t.compute
        width = rotary.dim // 2 if rotary.halved else rotary.dim
        context.cos, context.sin = tables(t, positions, width, dtype)
        t.enter("rotary_emb")
        local = _local_rotary(stack)
        if local is not None:
            context.local_cos, context.local_sin = tables(t, context.seq_len, local.dim, dtype)
    if any(spec.form in DIRECT_FORMS for spec in _attentions(stack)):
        from memplan.graph.direct_attention import direct_masks  # only for Falcon

        direct_masks(t, _attentions(stack)[0], context)
    if any(spec.form in ALIBI_FORMS for spec in _attentions(stack)):
        from memplan.graph.alibi import add_alibi  # only for BLOOM and MPT

        add_alibi(t, _attentions(stack)[0], context)
    if any(spec.position_bias is PositionBias.STACK for spec in _attentions(stack)):
        from memplan.graph.relative import add_stack_bias  # only for MPNet

        add_stack_bias(t, _attentions(stack)[0], context)
    if any(spec.distances is not None for spec in _attentions(stack)):
        from memplan.graph.disentangled import make_distances  # only for DeBERTa

        make_distances(t, stack, context)
    return context


def _first_rotary(stack: StackSpec) -> RotarySpec | None:
    """The rotary embedding of layers without a window, where those with one have their own."""
    specs = [spec for spec in _attentions(stack) if spec.rotary is not None]
    if _local_rotary(stack) is not None:
        specs = [spec for spec in specs if spec.sliding_window is None]
    return specs[0].rotary if specs else None


def _local_rotary(stack: StackSpec) -> RotarySpec | None:
    """The rotary embedding of layers with a window, where both kinds have tables of their own."""
    specs = [spec for spec in _attentions(stack) if spec.rotary is not None]
    local = [spec.rotary for spec in specs if spec.sliding_window is not None]
    if not stack.local_rotary or not local or len(local) == len(specs):
        return None
    return local[0]


def _attentions(stack: StackSpec) -> list[AttentionSpec]:
    """What the scores of each run that has some are made of."""
    found = [run.layer.attention for run in stack.runs]
    plain = [spec for spec in found if isinstance(spec, AttentionSpec)]
    if len(plain) == len(found):
        return plain
    from memplan.model.latent import LatentAttentionSpec  # only for DeepSeek's kin

    return [
        spec.scores if isinstance(spec, LatentAttentionSpec) else spec
        for spec in found
        if isinstance(spec, AttentionSpec | LatentAttentionSpec)
    ]


def attention_masks(
    t: Tape, model: ModelSpec, stack: StackSpec, context: StackContext
) -> tuple[Tensor | None, Tensor | None]:
    """The causal mask and the sliding one, where a layer needs it and its kernel has no mode for it.

    With sdpa a window that the sequence does not fill is left to the kernel's causal mode
    (transformers' ``_ignore_causal_mask_sdpa``).
    """
    if not _attentions(stack):
        return None, None
    if not all(spec.causal for spec in _attentions(stack)):
        return padding_mask(t, stack), two_sided_mask(t, stack, context)
    if any(spec.form is AttentionForm.MASK_PRODUCT for spec in _attentions(stack)):
        return None, None
    eager = t.kernels.attention is AttentionKernel.EAGER or model.eager_attention_only
    windows = [spec.sliding_window for spec in _attentions(stack) if spec.sliding_window]
    length = context.seq_len
    full = sliding = None
    if eager and (stack.mixed_masks or len(windows) < len(_attentions(stack))):
        full = additive_mask(t, causal_pattern(t, length, length), context.batch, t.compute)
        t.hold(full)
    elif stack.written_mask:
        full = causal_pattern(t, length, length)
        t.hold(full)
    if (windows or stack.spare_window_mask) and (eager or length >= min(windows, default=0)):
        sliding = sliding_pattern(t, length, length)
        if eager:
            sliding = additive_mask(t, sliding, context.batch, t.compute)
        t.hold(sliding)
    return full, sliding


def two_sided_mask(t: Tape, stack: StackSpec, context: StackContext) -> Tensor | None:
    """What an encoder's layers with a window are given, unless the sequence is shorter than it.

    Their ``sliding_window`` counts the neighbours on either side (ModernBERT).
    """
    windows = [spec.sliding_window for spec in _attentions(stack) if spec.sliding_window]
    if not windows or context.seq_len < min(windows):
        return None
    mask = two_sided_pattern(t, context.seq_len)
    if t.kernels.attention is AttentionKernel.EAGER:
        mask = additive_mask(t, mask, context.batch, t.compute)
    t.hold(mask)
    return mask


def padding_mask(t: Tape, stack: StackSpec) -> Tensor | None:
    """What LayoutLM adds to the scores of every sequence: a row of its keys."""
    if not any(spec.padding_mask for spec in _attentions(stack)):
        return None
    mask = t.tensor(t.options.batch_size * t.options.seq_len, t.compute)
    t.record("mask", (), (mask,))
    t.hold(mask)
    return mask


def run_layers(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """Every run of equal layers, split where only some are checkpointed."""
    t.end(x)
    embedded = x
    for position, run in enumerate(split_runs(t, stack)):
        x = run_layer(t, stack, run, x, context)
        if position == 0 and stack.convolution is not None:
            from memplan.graph.disentangled import convolve  # only for DeBERTa-v2

            x = convolve(t, stack.convolution, embedded, x, context)
    return x


def run_layer(
    t: Tape, stack: StackSpec, run: "TrainedRun", x: Tensor, context: StackContext
) -> Tensor:
    """A run's layers: written down once and repeated where they are all alike.

    They are not where one gives another dtype than it is given, as the first one does behind a
    projection under autocast, where the first trained one stands behind frozen ones, or where the
    later ones own no parameters.
    """
    remaining = run.count
    first = None
    while remaining:
        given = x
        t.begin(
            f"{stack.name}.layers",
            repeat=1 if run.shared else remaining,
            checkpointed=run.checkpointed,
            frozen=run.frozen,
            again=first,
            x=x,
        )
        x = decoder_layer(t, x, run.layer, context)
        t.end(x)
        if x.dtype is not given.dtype or x.requires_grad is not given.requires_grad:
            t.segment.repeat = 1
        if run.shared and first is None:
            first = t.segment
        remaining -= t.segment.repeat
    return x


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """Equal layers that are also trained in the same way."""

    count: int
    layer: LayerSpec
    checkpointed: bool
    frozen: bool
    shared: bool = False


def split_runs(t: Tape, stack: StackSpec) -> list[TrainedRun]:
    """The stack's runs, cut where checkpointing or freezing begins or ends.

    A share of checkpointed layers means the first ones, as torchtitan counts them.
    """
    options = t.options
    whole = getattr(options.freeze, stack.name)
    num_checkpointed = round(options.checkpointed_layers * stack.num_layers)
    cuts = {0, num_checkpointed, stack.num_layers}
    for first, last in options.freeze.layer_ranges:
        cuts |= {first, last + 1}
    parts: list[TrainedRun] = []
    start = 0
    for run in stack.runs:
        inside = [] if run.shared else sorted(_between(cuts, start, start + run.count))
        for low, high in pairwise([start, *inside, start + run.count]):
            frozen = whole or options.freeze.freezes_layer(low)
            checkpointed = low < num_checkpointed
            parts.append(TrainedRun(high - low, run.layer, checkpointed, frozen, run.shared))
        start += run.count
    return parts


def _between(cuts: set[int], low: int, high: int) -> list[int]:
    return [cut for cut in cuts if low < cut < high]


def finish_stack(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """The final norm; then the stack's shared tensors are let go."""
    if stack.final_norm is not None or stack.final_dropout or stack.projected_out:
        t.begin(f"{stack.name}.norm", x=x, frozen=_norm_frozen(t, stack))
    if stack.final_norm is not None:
        x = norm(t, x, stack.final_norm, "norm", context.hidden_size)
    if stack.projected_out and stack.embedding is not None:
        width = stack.embedding.embedding_size
        x = linear(t, x, "project_out", context.hidden_size, width)
    x = dropout(t, x, stack.final_dropout)
    cached = [tensor.storage for tensor, _ in t.cached]
    for segment in t.segments:
        for operation in segment.operations:
            for tensor in operation.outputs:
                if tensor.storage.held and tensor.storage not in cached:
                    t.release(tensor)
    t.end(x)
    return x


def _norm_frozen(t: Tape, stack: StackSpec) -> bool:
    freeze = t.options.freeze
    return freeze.norm or bool(getattr(freeze, stack.name))


def head(t: Tape, model: ModelSpec, x: Tensor, table: Parameter) -> None:
    """What the task adds, and its loss."""
    t.begin("head", x=x, frozen=t.options.freeze.head)
    t.segment.component = "logits_and_loss"
    if model.task is not Task.BASE:
        t.leave(BASE_MODEL)
    embedded = model.stacks[0].embedding
    if embedded is not None and embedded.prompts is not None:
        from memplan.graph.prompts import cut_prompts  # only for CPM-Ant

        x = cut_prompts(t, x, model.hidden_size)
    pooled = base_parts(t, model, x)
    if model.task is Task.MASKED_LM:
        loss = masked_lm(t, model, x, table)
    elif model.task is Task.PRETRAINING:
        loss = replaced_tokens(t, model, x)
    elif model.task in CLASSIFICATION_TASKS:
        loss = classification(t, model, x, pooled)
    elif model.task is Task.CAUSAL_LM:
        loss = causal_lm(t, model, x, table)
    else:
        loss = x if pooled is None else pooled
    t.release_cache()
    t.leave(WHOLE_MODEL)
    t.end(loss)


def causal_lm(t: Tape, model: ModelSpec, x: Tensor, table: Parameter) -> Tensor:
    """The loss of a decoder, by the kernels' way to it."""
    if model.head.router_loss:
        from memplan.graph.router_loss import router_loss  # only for mixtures that ask for it

        router_loss(t, model.stacks[0])
    if model.head.plain_loss:
        return cross_entropy(t, output_matrix(t, model, model.head, x, table))
    if t.kernels.loss in GRADIENTS_IN_FORWARD:
        weight = table
        if not model.head.tied:
            weight = t.parameter("lm_head.weight", model.num_outputs, table.shape[-1])
        return language_model_loss(t, x, weight, model.num_outputs, lambda hidden: hidden)
    return language_model_loss(
        t,
        x,
        table,
        model.num_outputs,
        lambda hidden: output_matrix(t, model, model.head, hidden, table),
    )


def output_matrix(t: Tape, model: ModelSpec, spec: HeadSpec, x: Tensor, table: Parameter) -> Tensor:
    """Hidden states to logits, through the token table where it is tied."""
    width = table.shape[-1]
    if spec.input_scaled:
        x = t.scale(x)
        t.linger(x)
    if spec.tied:
        bias = t.parameter("lm_head.bias", model.vocab_size) if spec.bias else None
        logits = matmul_weight(t, x, table, bias)
    else:
        logits = linear(t, x, "lm_head", width, model.num_outputs, bias=spec.bias)
    if spec.softcap:
        logits = t.scale(t.elementwise("tanh", t.scale(logits), saves_output=True))
    if spec.scaled:
        logits = t.scale(logits)
    return logits
