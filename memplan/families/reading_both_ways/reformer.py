"""Reformer, counted: reversible layers, attention by hashing or in chunks, axial positions."""

from memplan.families.counted import classifier, counted_model
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

TASKS = (
    Task.CAUSAL_LM,
    Task.BASE,
    Task.MASKED_LM,
    Task.SEQUENCE_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
)
HASHED, LOCAL = "lsh", "local"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config; what the layers return is twice as wide as the hidden size."""
    task = reject_task(reader, request, *TASKS)
    hidden, labels = reader.integer("hidden_size"), request.labels(reader)

    def declare(table: ParameterTable, task: Task) -> None:
        with table.block("embed"):
            table.embedding("word_embeddings", reader.integer("vocab_size"), hidden)
            _positions(table, reader, hidden)
        for kind in (HASHED, LOCAL):
            with table.block("layers", count=_kinds(reader).count(kind)):
                _layer(table, reader, hidden, hashed=kind == HASHED)
        with table.block("norm"):
            table.norm("layer_norm", 2 * hidden)
        with table.block("head"):
            _head(table, reader, hidden, labels, task)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=hidden,
        context_length=reader.integer("max_position_embeddings"), tied=False,
    )  # fmt: skip


def _kinds(reader: ConfigReader) -> list[str]:
    """What attention each layer has; as many layers as there are entries."""
    kinds = reader.texts("attn_layers")
    for kind in kinds:
        reader.choice("attn_layers", kind, (HASHED, LOCAL))
    if not kinds:
        key = "attn_layers"
        raise reader.fail(key, "is empty")
    return kinds


def _positions(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    """A table along each axis, side by side in the columns, or one plain table."""
    if not reader.flag("axial_pos_embds"):
        table.embedding("position_embeddings", reader.integer("max_position_embeddings"), hidden)
        return
    lengths = reader.integers("axial_pos_shape", minimum=1)
    widths = reader.integers("axial_pos_embds_dim", minimum=1)
    if len(lengths) != len(widths) or sum(widths) != hidden:
        problem = f"must have one entry for each axis and sum to the hidden_size ({hidden})"
        key = "axial_pos_embds_dim"
        raise reader.fail(key, problem)
    for axis, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        table.parameter("position_embeddings", f"weights.{axis}", length, width)


def _layer(table: ParameterTable, reader: ConfigReader, hidden: int, *, hashed: bool) -> None:
    """Hashed attention has one projection for queries and keys."""
    width = reader.integer("num_attention_heads") * reader.integer("attention_head_size")
    inner = reader.integer("feed_forward_size")
    table.norm("self_attn_layer_norm", hidden)
    for name in ("qk_proj", "v_proj") if hashed else ("q_proj", "k_proj", "v_proj"):
        table.linear(f"self_attn.{name}", hidden, width, bias=False)
    table.linear("self_attn.o_proj", width, hidden, bias=False)
    table.norm("final_layer_norm", hidden)
    table.linear("mlp.up_proj", hidden, inner)
    table.linear("mlp.down_proj", inner, hidden)


def _head(
    table: ParameterTable, reader: ConfigReader, hidden: int, labels: int, task: Task
) -> None:
    """The output matrix is never tied, and its bias is the head's."""
    if task in {Task.CAUSAL_LM, Task.MASKED_LM}:
        rows = reader.integer("vocab_size")
        table.linear("lm_head.decoder", 2 * hidden, rows, bias=False)
        table.parameter("lm_head", "bias", rows)
    elif task is not Task.BASE:
        classifier(table, task, hidden, labels, dense=True, features=2 * hidden)
