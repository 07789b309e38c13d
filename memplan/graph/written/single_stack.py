"""An encoder that is no class yet on the tape, or a model of no stack: embedding, runs of layers, head and loss."""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.attention.masks import padding_mask
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.modules.batch import ids_bytes, input_blocks
from memplan.graph.stack_context import StackContext
from memplan.graph.stacks import (
    BASE_MODEL,
    WHOLE_MODEL,
    TrainedRun,
    counted_parts,
    new_tape,
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
from memplan.graph.written.layers import post_norm_layer
from memplan.model.heads import FEATURES, WHOLE_SEQUENCES
from memplan.model.layers import CrossedSpec, StackSpec
from memplan.model.parameters import ModelPart
from memplan.model.spec import ModelSpec, Task
from memplan.training.objectives import JOINED

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
    if model.tables:
        from memplan.graph.counted import record_tables  # only for parts that are merely counted

        record_tables(t, counted_parts(model), tied=model.head.tied)
        if not model.stacks:
            return t
    t.inputs = input_blocks(t, model)
    stack = model.stacks[0]
    if stack.embedding is not None and stack.embedding.regions is not None:
        options = replace(options, seq_len=options.seq_len + stack.embedding.regions.count)
        t.options = options
        t.inputs += _beside_tokens(t, stack.embedding.regions.count)
    if stack.crossed is not None:
        t.inputs += _of_regions(t, model, stack.crossed)
    context = StackContext(
        hidden_size=model.hidden_size, batch=t.options.batch_size, seq_len=t.options.seq_len
    )
    x, table = embed(t, model, stack)
    context.mask = padding_mask(t, stack)
    x = run_layers(t, stack, x, context)
    let_go(t, x)
    t.options = options
    head(t, model, x, table, context.beside)
    return t


def _beside_tokens(t: Tape, regions: int) -> list[int]:
    """What a batch with a picture's regions holds beside their features, each tensor's [bytes]: masks of tokens and
    regions, labels of regions too, and whether picture and text belong together."""
    batch = t.options.batch_size
    tokens, beside = batch * t.options.seq_len, batch * regions
    labels = ids_bytes(t, tokens) - ids_bytes(t, tokens - beside)
    masks = ids_bytes(t, tokens - beside), t.tensor(beside, DType.FP32).storage.num_bytes
    return [labels, *masks, ids_bytes(t, batch)]


def _of_regions(t: Tape, model: ModelSpec, crossed: CrossedSpec) -> list[int]:
    """LXMERT's labels of regions, each with how sure it is, whether the picture fits, and answers, each tensor's [bytes]."""
    batch = t.options.batch_size
    rows = batch * crossed.regions.count
    losses = model.head.regions.losses if model.head.regions is not None else ()
    labels = [ids_bytes(t, rows) for name, _ in losses if name != FEATURES]
    sure = len(losses) * [t.tensor(rows, t.compute).storage.num_bytes]
    return [*labels, *sure, *2 * [ids_bytes(t, batch)]]


def embed(t: Tape, model: ModelSpec, stack: StackSpec) -> tuple[Tensor, Parameter]:
    """Token, position and type embeddings, their sum, norm and dropout."""
    spec = stack.embedding
    assert spec is not None
    t.begin("embed", part=ModelPart.EMBEDDING, frozen=t.options.freeze.embeddings)
    t.enter(WHOLE_MODEL)
    if model.task is not Task.BASE:
        t.enter(BASE_MODEL)
    return module_embeddings(t, model, spec)


def run_layers(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """Every run of equal layers, split where only some are checkpointed."""
    if stack.funnel is not None:
        from memplan.graph.written.funnel import run_funnel  # only for Funnel

        return run_funnel(t, stack.funnel, x, context)
    t.end(x)
    for run in split_runs(t, stack):
        x = run_layer(t, stack, run, x, context)
    if stack.crossed is not None:
        from memplan.graph.written.crossed_streams import cross_streams  # only for LXMERT

        return cross_streams(t, stack, stack.crossed, x, context)
    return x


def run_layer(
    t: Tape, stack: StackSpec, run: TrainedRun, x: Tensor, context: StackContext
) -> Tensor:
    """A run's layers: written down once and repeated where they are all alike.

    They are not where one gives another dtype than it is given, as the first one does behind a
    projection under autocast, or where the first trained one stands behind frozen ones.
    """
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
        x = post_norm_layer(t, x, run.layer, context)
        t.end(x)
        if stack.crossed is not None:
            t.cache(x)
        if x.dtype is not given.dtype or x.requires_grad is not given.requires_grad:
            t.segment.repeat = 1
        remaining -= t.segment.repeat
    return x


def let_go(t: Tape, x: Tensor) -> None:
    """The stack's shared tensors are let go."""
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


def head(
    t: Tape, model: ModelSpec, x: Tensor, table: Parameter, beside: Tensor | None = None
) -> None:
    """What the task adds, and its loss; ``beside`` is the stream that ran beside the hidden states."""
    t.begin("head", part=ModelPart.HEAD, x=x, frozen=t.options.freeze.head)
    if model.task is not Task.BASE:
        t.leave(BASE_MODEL)
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
    else:
        loss = x if pooled is None else pooled
    t.release_cache()
    t.leave(WHOLE_MODEL)
    t.end(loss)
    if t.options.objective in JOINED and t.options.ends_in_loss:
        from memplan.graph.written.joint_losses import joint_loss  # only for jobs of several models

        joint_loss(t, loss, model.num_outputs)
