"""Models that are counted whole: what their readers share.

A type whose attention or convolutions are not written down as operations is read into tables of
weights. Its parameters, gradients and optimizer states are exact; its activations are left out,
and the estimate says so.
"""

from collections.abc import Callable

from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task, Tying

Declare = Callable[[ParameterTable, Task], None]
"""Declares everything that the class for a task owns."""


def counted_model(
    reader: ConfigReader,
    request: ReadRequest,
    declare: Declare,
    *,
    task: Task,
    vocab_size: int,
    hidden_size: int,
    context_length: int,
    tied: bool,
    tying: Tying = Tying.CLEAR,
) -> ModelSpec:
    """A model of tables only: those of the task's class, and those of the base model."""
    tables, base_tables = ParameterTable(), ParameterTable()
    declare(tables, task)
    declare(base_tables, Task.BASE)
    known = all(block.body is not None for block in tables.blocks())
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        context_length=context_length,
        stacks=(),
        head=HeadSpec(tied=tied),
        num_labels=request.labels(reader),
        tying=tying,
        checkpoint_dtype=checkpoint_dtype(reader),
        tables=tables.blocks(),
        base_tables=base_tables.blocks(),
        activations_left_out="" if known else f"activations of {request.model_type}",
        source=reader.source,
    )


def attention(
    table: ParameterTable,
    name: str,
    hidden_size: int,
    *,
    width: int | None = None,
    source_size: int | None = None,
    key_value_width: int | None = None,
    bias: bool = True,
    key_bias: bool | None = None,
    output_bias: bool | None = None,
) -> None:
    """Projections of queries, keys, values and the output.

    ``source_size`` is the width of what keys and values are made from, where it is not the queries'.
    """
    width = hidden_size if width is None else width
    source_size = hidden_size if source_size is None else source_size
    narrow = width if key_value_width is None else key_value_width
    keys_biased = bias if key_bias is None else key_bias
    table.linear(f"{name}.q_proj", hidden_size, width, bias=bias)
    table.linear(f"{name}.k_proj", source_size, narrow, bias=keys_biased)
    table.linear(f"{name}.v_proj", source_size, narrow, bias=bias)
    output_biased = bias if output_bias is None else output_bias
    table.linear(f"{name}.o_proj", width, hidden_size, bias=output_biased)


def feed_forward(
    table: ParameterTable,
    hidden_size: int,
    inner_size: int,
    *,
    name: str = "mlp",
    bias: bool = True,
    gated: bool = False,
) -> None:
    """Two linear layers, or three."""
    if gated:
        table.linear(f"{name}.gate_proj", hidden_size, inner_size, bias=bias)
    table.linear(f"{name}.up_proj", hidden_size, inner_size, bias=bias)
    table.linear(f"{name}.down_proj", inner_size, hidden_size, bias=bias)


def encoder_layer(table: ParameterTable, hidden_size: int, inner_size: int) -> None:
    """BERT's layer: attention and feed-forward with biases, a layer norm for each."""
    attention(table, "self_attn", hidden_size)
    table.norm("self_attn_layer_norm", hidden_size)
    feed_forward(table, hidden_size, inner_size)
    table.norm("final_layer_norm", hidden_size)


def masked_lm_head(
    table: ParameterTable,
    hidden_size: int,
    vocab_size: int,
    same_as: str,
    *,
    width: int | None = None,
    name: str = "lm_head",
    spare_bias: bool = False,
) -> None:
    """A dense layer and a norm, then the output matrix, tied or not, with a bias.

    Untied, many classes keep a bias of the head's own, which serves nothing (``spare_bias``).
    """
    width = hidden_size if width is None else width
    table.linear(f"{name}.transform.dense", hidden_size, width)
    table.norm(f"{name}.transform.norm", width)
    table.tied(f"{name}.decoder", same_as, vocab_size, width)
    table.parameter(f"{name}.decoder", "bias", vocab_size)
    if spare_bias:
        table.parameter(name, "bias", vocab_size, unused=True)


def classifier(
    table: ParameterTable,
    task: Task,
    hidden_size: int,
    num_labels: int,
    *,
    dense: bool = False,
    features: int | None = None,
) -> None:
    """A linear layer to the classes; with ``dense``, for sequences, another before it.

    ``features`` is the width of the hidden states, where it is not ``hidden_size``.
    """
    features = hidden_size if features is None else features
    outputs = 1 if task is Task.MULTIPLE_CHOICE else num_labels
    whole = task in {Task.SEQUENCE_CLASSIFICATION, Task.MULTIPLE_CHOICE}
    if dense and whole:
        table.linear("classifier.dense", features, hidden_size)
        features = hidden_size
    table.linear("classifier.out_proj", features, outputs)


CLASSIFIED = (
    Task.SEQUENCE_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
)
"""Tasks that ``classifier`` declares a head for; multiple choice is another, where a class has it."""


def shared_table(
    table: ParameterTable, num_rows: int, width: int, stacks: tuple[str, ...], *, tied: bool
) -> None:
    """The token table of several stacks; untied, each has its own, and the shared one is unused."""
    with table.block("embed"):
        table.embedding("shared", num_rows, width, unused=not tied)
        for name in () if tied else stacks:
            table.embedding(f"{name}.embed_tokens", num_rows, width)


def square(table: ParameterTable, name: str, size: int) -> None:
    """A linear layer from a width to itself: a pooler."""
    table.linear(name, size, size)
