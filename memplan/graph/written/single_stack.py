"""A model of one stack on the tape: embedding, runs of layers, final norm, head and loss."""

from dataclasses import replace
from functools import partial

from memplan.dtypes import DType
from memplan.graph.attention.masks import attention_masks, attentions
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.splits import Sharing
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.modules.batch import ids_bytes, input_bytes
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding, embedding_lookup
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.operations.rotary import complex_tables, rotary_tables
from memplan.graph.stack_context import StackContext
from memplan.graph.stacks import (
    BASE_MODEL,
    WHOLE_MODEL,
    TrainedRun,
    counted_parts,
    new_tape,
    output_matrix,
    split_runs,
)
from memplan.graph.written.embeddings import module_embeddings
from memplan.graph.written.heads import (
    base_parts,
    classification,
    masked_lm,
    next_sentence,
    replaced_tokens,
)
from memplan.graph.written.layers import decoder_layer
from memplan.graph.written.losses import language_model_loss, takes_matrix
from memplan.model.attention import (
    RotarySpec,
)
from memplan.model.heads import FEATURES, WHOLE_SEQUENCES
from memplan.model.layers import TOKENS_PER_STEP, CrossedSpec, NormPlacement, StackSpec
from memplan.model.parameters import ModelPart, WeightRole
from memplan.model.spec import ModelSpec, Task
from memplan.model.towers.compared.joining import Joining
from memplan.training.choices_of_kernels.kernels import Packing, RotaryKernel
from memplan.training.objectives import JOINED, Objective

"""Attention that adds a bias made for the whole stack."""
CLASSIFICATION_TASKS = frozenset(
    {*WHOLE_SEQUENCES, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING}
)
"""Tasks whose logits are of classes, not of tokens."""


def record_single_stack(model: ModelSpec, options: TapeOptions) -> Tape:
    """Write the training step of a model of one stack, or of none, on a new tape."""
    t = new_tape(model, options)
    # What a base model inside reads may not be known though its task's class is (Perceiver).
    known = all(block.body is not None for block in counted_parts(model))
    if not model.stacks and known and not model.activations_left_out:
        from memplan.graph.towers.flow import record_flow  # only for towers by themselves

        record_flow(t, counted_parts(model), tied=model.head.tied)
        return t
    if model.tables and model.join is None:
        from memplan.graph.counted import record_tables  # only for parts that are merely counted

        record_tables(t, counted_parts(model), tied=model.head.tied)
        if not model.stacks:
            return t
    if model.join is not None and model.join.joining is Joining.UNSEEN:
        from memplan.graph.towers.flow import (
            record_flow,  # only for towers that nothing is shown to
        )

        record_flow(t, counted_parts(model), tied=model.head.tied)
    t.inputs_bytes = input_bytes(t, model)
    stack = model.stacks[0]
    if stack.embedding is not None and stack.embedding.trajectory is not None:
        options = replace(options, seq_len=TOKENS_PER_STEP * options.seq_len)
        t.options, t.inputs_bytes = options, 0
    if stack.embedding is not None and stack.embedding.regions is not None:
        options = replace(options, seq_len=options.seq_len + stack.embedding.regions.count)
        t.options = options
        t.inputs_bytes += _beside_tokens(t, stack.embedding.regions.count)
    if stack.crossed is not None:
        t.inputs_bytes += _of_regions(t, model, stack.crossed)
    stage = options.stage
    context = StackContext(
        hidden_size=model.hidden_size, batch=t.options.batch_size, seq_len=t.options.seq_len
    )
    memory = None
    if model.join is not None and model.join.joining is Joining.CROSSED:
        from memplan.graph.written.crossing import record_memory  # only for Llama 3.2 Vision

        memory = record_memory(t, counted_parts(model))
    if stage is None or stage.is_first:
        x, table = embed(t, model, stack)
    else:
        from memplan.graph.stages import receive  # only for pipelines

        x, table = receive(t, model, stage)
    vectors = stack.embedding.layer_vectors if stack.embedding is not None else None
    held = None
    if vectors is not None:
        from memplan.graph.written.layer_vectors import layer_vectors  # only for Gemma 4

        held = layer_vectors(t, x, vectors, model.hidden_size)
    if stack.streams is not None:
        from memplan.graph.written.hyper_connections import expand_streams  # only for DeepSeek-V4

        x = expand_streams(t, x, stack.streams)
    share_tensors(t, model, stack, context)
    context.vectors = held
    if memory is not None:
        from memplan.graph.towers.media import tiles_of
        from memplan.graph.written.crossing import share_memory  # only for Llama 3.2 Vision

        share_memory(t, context, memory, tiles_of(model))
    x = run_layers(t, stack, x, context)
    if stage is not None and not stage.is_last:
        from memplan.graph.stages import hand_on  # only for pipelines

        hand_on(t)
        return t
    x = finish_stack(t, stack, x, context)
    t.options = options
    head(t, model, x, table, context.beside)
    return t


def _beside_tokens(t: Tape, regions: int) -> int:
    """What a batch with a picture's regions holds beside their features [bytes]: masks of tokens and
    regions, labels of regions too, and whether picture and text belong together."""
    batch = t.options.batch_size
    tokens, beside = batch * t.options.seq_len, batch * regions
    labels = ids_bytes(t, tokens) - ids_bytes(t, tokens - beside)
    masks = ids_bytes(t, tokens - beside) + t.tensor(beside, DType.FP32).storage.num_bytes
    return labels + masks + ids_bytes(t, batch)


def _of_regions(t: Tape, model: ModelSpec, crossed: CrossedSpec) -> int:
    """LXMERT's labels of regions, each with how sure it is, whether the picture fits, and answers [bytes]."""
    batch = t.options.batch_size
    rows = batch * crossed.regions.count
    losses = model.head.regions.losses if model.head.regions is not None else ()
    labels = sum(ids_bytes(t, rows) for name, _ in losses if name != FEATURES)
    sure = len(losses) * t.tensor(rows, t.compute).storage.num_bytes
    return labels + sure + 2 * ids_bytes(t, batch)


def embed(t: Tape, model: ModelSpec, stack: StackSpec) -> tuple[Tensor, Parameter]:
    """Token, position and type embeddings, their sum, norm and dropout."""
    spec = stack.embedding
    assert spec is not None
    tokens = t.options.batch_size * t.options.seq_len
    t.begin("embed", part=ModelPart.EMBEDDING, frozen=t.options.freeze.embeddings)
    t.enter(WHOLE_MODEL)
    if model.task is not Task.BASE:
        t.enter(BASE_MODEL)
    if spec.own_module:
        return module_embeddings(t, model, spec, partial(_with_pictures, t, model))
    if spec.trajectory is not None:
        from memplan.graph.written.trajectories import trajectory_embeddings  # only then

        return trajectory_embeddings(t, model, spec, spec.trajectory)
    rows = model.vocab_size + spec.extra_rows
    group = t.options.tensor_parallel
    if group is None or t.options.split_plan.table is Sharing.WHOLE:
        table = t.parameter(
            "embed_tokens.weight", rows, spec.embedding_size, role=WeightRole.TOKEN_TABLE
        )
    else:
        from memplan.graph.splitting.tensor_parallel import token_table  # only then

        table = token_table(t, group, rows, spec.embedding_size, tied=model.head.tied)
    if spec.patch_features:
        shape = model.hidden_size, spec.patch_features
        t.parameter("vision_embed_tokens.weight", *shape).unused = True
        t.parameter("vision_embed_tokens.bias", model.hidden_size).unused = True
    prompts = 0 if t.adaptation is None else t.adaptation.num_prompts
    x = embedding_lookup(t, table, tokens - prompts * t.options.batch_size)
    if prompts and t.adaptation is not None:
        x = t.adaptation.prompted(t, x)
    if group is not None and table.ranks > 1:
        from memplan.graph.splitting.tensor_parallel import add_up  # only then

        x = add_up(t, group, x)
    if spec.norm is not None and spec.norm_in_table:
        x = norm(t, x, spec.norm, "embed_norm", model.hidden_size)
    if spec.scaled:
        x = t.scale(x)
    t.embedded(x, table)
    t.hold(x)
    if spec.num_positions:
        rows = t.options.seq_len
        positions = t.tensor(rows, DType.INT64)
        t.record(OperationKind.ARANGE, (), (positions,))
        t.hold(positions)
        added = embedding(
            t, "embed_positions", spec.num_positions, model.hidden_size, rows, positions
        )
        x = t.add(x, added)
    if spec.norm is not None and not spec.norm_in_table:
        x = norm(t, x, spec.norm, "embed_norm", model.hidden_size)
    x = dropout(t, x, spec.dropout, module="dropout" if spec.dropout_module else "")
    return _with_pictures(t, model, x), table


def _with_pictures(t: Tape, model: ModelSpec, x: Tensor) -> Tensor:
    """What towers give, written over the embeddings of a model that has such."""
    if model.join is None or model.join.joining in (Joining.CROSSED, Joining.UNSEEN):
        return x
    from memplan.graph.towers.joining import joined_embeddings  # only for towers

    return joined_embeddings(t, model, counted_parts(model), x, model.join)[0]


def _make_masks(t: Tape, model: ModelSpec, stack: StackSpec, context: StackContext) -> None:
    """The stack's masks, unless the class has made them among its embeddings."""
    if not context.has_masks:
        context.has_masks = True
        context.mask, context.sliding_mask = attention_masks(t, model, stack, context)


def _frequencies(t: Tape, rotary: RotarySpec) -> None:
    """``inv_freq`` and ``original_inv_freq``, which the module keeps: as small as they are, they hold a
    segment of the allocator's where ZeRO gives all weights around them back.

    Behind the layers, as ``rotary_emb`` stands. Left out beside a quantized base, whose loader brings
    them in an order of its own.
    """
    if not t.decomposed and t.options.quantizer is None:
        for _ in range(2):
            t.buffer(rotary.dim // 2, DType.FP32, behind=True)


def share_tensors(t: Tape, model: ModelSpec, stack: StackSpec, context: StackContext) -> None:
    """Position tables and masks, made once and read by every layer."""
    _make_masks(t, model, stack, context)
    rotary = _first_rotary(stack)
    if rotary is not None:
        by_complex = rotary.complex_numbers or t.kernels.rotary is RotaryKernel.COMPLEX
        tables = complex_tables if by_complex else rotary_tables
        # Rows of several documents have position ids of their own; shares of sequences are given them.
        apart = t.options.packing is Packing.DOCUMENTS or t.options.context_parallel is not None
        rows = context.batch if apart else 1
        positions = context.seq_len * rows
        if rotary.sections:
            from memplan.graph.attention.rotary import sectioned_tables  # only for Qwen3.5

            tables, positions = sectioned_tables, context.seq_len * context.batch
        if rotary.repeated:
            from memplan.graph.attention.rotary import both_half_tables  # only for DeepSeek-V4

            both_half_tables(t, context, rotary.dim // 2)
            return
        t.enter("rotary_emb")
        _frequencies(t, rotary)
        context.cos, context.sin = tables(t, positions, rotary.dim, t.compute)
        local = _local_rotary(stack)
        if local is not None:
            _frequencies(t, local)
            context.local_cos, context.local_sin = tables(
                t, context.seq_len * rows, local.dim, t.compute
            )


def _first_rotary(stack: StackSpec) -> RotarySpec | None:
    """The rotary embedding of layers without a window, where those with one have their own."""
    specs = [each for each in attentions(stack) if each.rotary]
    if _local_rotary(stack) is not None:
        specs = [spec for spec in specs if spec.sliding_window is None]
    return specs[0].rotary if specs else None


def _local_rotary(stack: StackSpec) -> RotarySpec | None:
    """The rotary embedding of layers with a window, where both kinds have tables of their own."""
    specs = [spec for spec in attentions(stack) if spec.rotary is not None]
    local = [spec.rotary for spec in specs if spec.sliding_window is not None]
    if not stack.local_rotary or not local or len(local) == len(specs):
        return None
    return local[0]


def run_layers(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """Every run of equal layers, split where only some are checkpointed."""
    if stack.funnel is not None:
        from memplan.graph.written.funnel import run_funnel  # only for Funnel

        return run_funnel(t, stack.funnel, x, context)
    t.end(x)
    runs = split_runs(t, stack)
    if t.options.stage is not None:
        from memplan.graph.stages import edge_runs  # only for pipelines

        runs = edge_runs(runs, t.options.stage)
    for run in runs:
        x = run_layer(t, stack, run, x, context)
    if stack.crossed is not None:
        from memplan.graph.written.crossed_streams import cross_streams  # only for LXMERT

        return cross_streams(t, stack, stack.crossed, x, context)
    return x


def run_layer(
    t: Tape, stack: StackSpec, run: "TrainedRun", x: Tensor, context: StackContext
) -> Tensor:
    """A run's layers: written down once and repeated where they are all alike.

    They are not where one gives another dtype than it is given, as the first one does behind a
    projection under autocast, or where the first trained one stands behind frozen ones.
    """
    if run.layer.placement is NormPlacement.CROSSING and context.memory is None:
        from memplan.graph.written.crossing import (
            pass_over,  # only for Llama 3.2's text model alone
        )

        pass_over(t, stack, run, context)
        return x
    remaining = run.count
    is_repeated = stack.crossed is None
    while remaining:
        given = x
        t.begin(
            f"{stack.name}.layers",
            part=ModelPart.LAYERS,
            repeat=remaining if is_repeated else 1,
            checkpointed=run.checkpointed,
            frozen=run.frozen,
            x=x,
        )
        t.segment.layer = run.layer
        x = decoder_layer(t, x, run.layer, context)
        t.end(x)
        if stack.crossed is not None:
            t.cache(x)
        if x.dtype is not given.dtype or x.requires_grad is not given.requires_grad:
            t.segment.repeat = 1
        remaining -= t.segment.repeat
    return x


def finish_stack(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """The final norm; then the stack's shared tensors are let go."""
    if stack.final_norm is not None or stack.projected_out:
        t.begin(f"{stack.name}.norm", part=ModelPart.NORM, x=x, frozen=_norm_frozen(t, stack))
    if stack.streams is not None:
        from memplan.graph.written.hyper_connections import collapse_streams  # only for DeepSeek-V4

        x = collapse_streams(t, x, stack.streams, context.hidden_size)
    if stack.final_norm is not None:
        x = norm(t, x, stack.final_norm, "norm", context.hidden_size)
    if stack.projected_out and stack.embedding is not None:
        width = stack.embedding.embedding_size
        x = linear(t, x, "project_out", context.hidden_size, width)
    kept = [tensor.storage for tensor, _ in t.cached]
    kept += [leaf.storage for leaf in t.leaves]
    kept += [storage for segment in t.segments for storage in segment.releases]
    for segment in t.segments:
        for operation in segment.operations:
            for tensor in operation.outputs:
                if tensor.storage.held and tensor.storage not in kept:
                    t.release(tensor)
                    kept.append(tensor.storage)
    t.end(x)
    return x


def _norm_frozen(t: Tape, stack: StackSpec) -> bool:
    freeze = t.options.freeze
    return freeze.norm or bool(getattr(freeze, stack.name))


def head(
    t: Tape, model: ModelSpec, x: Tensor, table: Parameter, beside: Tensor | None = None
) -> None:
    """What the task adds, and its loss; ``beside`` is the stream that ran beside the hidden states."""
    t.begin("head", part=ModelPart.HEAD, x=x, frozen=t.options.freeze.head)
    if model.task is not Task.BASE:
        t.leave(BASE_MODEL)
    embedded = model.stacks[0].embedding
    if embedded is not None and embedded.trajectory is not None:
        from memplan.graph.written.trajectories import predicted_actions  # only then

        t.end(predicted_actions(t, model, x, embedded.trajectory))
        return
    pooled = base_parts(t, model, x)
    if model.task is Task.MASKED_LM:
        loss = masked_lm(t, model, x, table)
    elif model.task is Task.PRETRAINING and model.head.discriminator is not None:
        loss = replaced_tokens(t, model, x)
    elif model.task is Task.PRETRAINING:
        loss = next_sentence(t, model, masked_lm(t, model, x, table), pooled)
        if model.head.regions is not None and pooled is not None:
            from memplan.graph.written.crossed_streams import region_losses  # only for LXMERT

            loss = region_losses(t, model, model.head.regions, loss, beside, pooled)
    elif model.task in CLASSIFICATION_TASKS:
        loss = classification(t, model, x, pooled)
    elif model.task is Task.CAUSAL_LM:
        t.loss_apart = model.head.unnamed_loss
        loss = causal_lm(t, model, x, table)
    elif model.head.vector_size:
        from memplan.graph.written.token_vectors import token_vectors  # only for retrievers

        loss = token_vectors(t, model, x)
    else:
        loss = x if pooled is None else pooled
    t.release_cache()
    t.leave(WHOLE_MODEL)
    t.end(loss)
    if t.options.objective in JOINED and t.options.ends_in_loss:
        from memplan.graph.written.joint_losses import joint_loss  # only for jobs of several models

        joint_loss(t, loss, model.num_outputs)


def causal_lm(t: Tape, model: ModelSpec, x: Tensor, table: Parameter) -> Tensor:
    """The loss of a decoder, by the kernels' way to it."""
    if t.options.objective is not Objective.TASK:
        from memplan.graph.written.joint_losses import objective_outputs  # only for jobs beside sft

        def project(hidden: Tensor) -> Tensor:
            return output_matrix(t, model, model.head, hidden, table)

        return objective_outputs(t, model, x, table, project)
    if model.head.router_loss:
        from memplan.graph.experts.router_loss import (
            router_loss,  # only for mixtures that ask for it
        )

        router_loss(t, model.stacks[0])
    if model.head.attended_loss:
        from memplan.graph.attended_loss import attended_loss  # only for Qwen2-Audio

        return attended_loss(t, output_matrix(t, model, model.head, x, table), model.num_outputs)
    if takes_matrix(t):
        weight = t.own_copy(table, "lm_head") if model.head.tied else table
        if not model.head.tied:
            weight = t.parameter(
                "lm_head.weight", model.num_outputs, table.shape[-1], role=WeightRole.OUTPUT
            )
        return language_model_loss(t, x, weight, model.num_outputs, lambda hidden: hidden)
    group = t.options.tensor_parallel
    return language_model_loss(
        t,
        x,
        table,
        model.num_outputs // (group.degree if group is not None and group.loss else 1),
        lambda hidden: output_matrix(t, model, model.head, hidden, table),
    )
