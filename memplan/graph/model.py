"""A whole model on the tape: embedding, runs of layers, final norm, head and loss."""

from memplan.dtypes import DType
from memplan.graph.blocks import StackContext, decoder_layer
from memplan.graph.operations import (
    activation,
    causal_lm_loss,
    cross_entropy,
    dropout,
    embedding,
    embedding_lookup,
    linear,
    matmul_weight,
    norm,
    rotary_tables,
)
from memplan.graph.tape import Parameter, Tape, TapeOptions, Tensor
from memplan.model.spec import HeadSpec, LayerRun, ModelSpec, StackSpec, Task
from memplan.training.kernels import AttentionKernel


def record_model(model: ModelSpec, options: TapeOptions) -> Tape:
    """Write the model's training step on a new tape."""
    t = Tape(options)
    t.inputs_bytes = 2 * _ids(t, options.batch_size * options.seq_len)
    stack = model.stacks[0]
    x, table = embed(t, model, stack)
    context = shared_tensors(t, model, stack)
    x = run_layers(t, stack, x, context)
    x = finish_stack(t, stack, x, context)
    head(t, model, x, table)
    return t


def _ids(t: Tape, count: int) -> int:
    return t.tensor(count, DType.INT64).storage.num_bytes


def embed(t: Tape, model: ModelSpec, stack: StackSpec) -> tuple[Tensor, Parameter]:
    """Token, position and type embeddings, their sum, norm and dropout."""
    spec = stack.embedding
    assert spec is not None
    tokens = t.options.batch_size * t.options.seq_len
    t.begin("embed")
    table = t.parameter("embed_tokens.weight", model.vocab_size, spec.embedding_size)
    x = embedding_lookup(t, table, tokens)
    t.hold(x)
    if spec.scaled:
        x = t.scale(x)
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
    x = dropout(t, x, spec.dropout)
    return x, table


def shared_tensors(t: Tape, model: ModelSpec, stack: StackSpec) -> StackContext:
    """Position tables and masks, made once and read by every layer."""
    context = StackContext(
        hidden_size=model.hidden_size,
        batch=t.options.batch_size,
        seq_len=t.options.seq_len,
    )
    attention = stack.runs[0].layer.attention
    seq_len = context.seq_len
    if attention.rotary is not None:
        context.cos, context.sin = rotary_tables(t, seq_len, attention.rotary.dim, t.compute)
    windows = [
        run.layer.attention.sliding_window
        for run in stack.runs
        if run.layer.attention.sliding_window is not None
    ]
    eager = t.kernels.attention is AttentionKernel.EAGER or model.eager_attention_only
    if eager and attention.causal:
        context.mask = _mask(t, context, t.compute)
    if windows:
        if eager:
            context.sliding_mask = _mask(t, context, t.compute)
        elif seq_len >= min(windows):
            context.sliding_mask = _mask(t, context, DType.BOOL)
    return context


def _mask(t: Tape, context: StackContext, dtype: DType) -> Tensor:
    mask = t.tensor(context.seq_len * context.seq_len * context.batch, dtype)
    t.record("mask", (), (mask,))
    t.hold(mask)
    return mask


def run_layers(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """Every run of equal layers, split where only some are checkpointed."""
    first = True
    remaining = round(t.options.checkpointed_layers * stack.num_layers)
    for run in stack.runs:
        for count, checkpointed in _split(run, remaining):
            if first:
                t.end(x)
                first = False
            t.begin(f"{stack.name}.layers", repeat=count, checkpointed=checkpointed, x=x)
            x = decoder_layer(t, x, run.layer, context)
            t.end(x)
        remaining = max(0, remaining - run.count)
    return x


def _split(run: LayerRun, checkpointed: int) -> list[tuple[int, bool]]:
    inside = min(run.count, checkpointed)
    parts = [(inside, True), (run.count - inside, False)]
    return [(count, flag) for count, flag in parts if count]


def finish_stack(t: Tape, stack: StackSpec, x: Tensor, context: StackContext) -> Tensor:
    """The final norm; then the stack's shared tensors are let go."""
    t.begin(f"{stack.name}.norm", x=x)
    if stack.final_norm is not None:
        x = norm(t, x, stack.final_norm, "norm", context.hidden_size)
    x = dropout(t, x, stack.final_dropout)
    for segment in t.segments:
        for operation in segment.operations:
            for tensor in operation.outputs:
                if tensor.storage.held:
                    t.release(tensor)
    t.end(x)
    return x


def head(t: Tape, model: ModelSpec, x: Tensor, table: Parameter) -> None:
    """What the task adds, and its loss."""
    t.begin("head", x=x)
    t.segment.component = "logits_and_loss"
    if model.task is Task.CAUSAL_LM:
        logits = output_matrix(t, model, model.head, x, table)
        loss = causal_lm_loss(t, logits, model.vocab_size)
    else:
        loss = x
    t.end(loss)


def output_matrix(
    t: Tape, model: ModelSpec, spec: HeadSpec, x: Tensor, table: Parameter
) -> Tensor:
    """Hidden states to logits, through the token table where it is tied."""
    width = table.shape[-1]
    if spec.tied:
        bias = t.parameter("lm_head.bias", model.vocab_size) if spec.bias else None
        logits = matmul_weight(t, x, table, bias)
    else:
        logits = linear(t, x, "lm_head", width, model.vocab_size, bias=spec.bias)
    if spec.softcap:
        logits = t.scale(t.elementwise("tanh", t.scale(logits), saves_output=True))
    return logits


