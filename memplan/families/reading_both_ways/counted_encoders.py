"""Encoders that are counted: their attention, convolutions or mixing are not written down.

Of Funnel classes of whole sequences; of BigBird and Longformer the tasks that BERT's heads do not cover. Each class adds its own weights to BERT's layer or replaces parts of it;
a row of ``FORMS`` says how.
"""

from collections.abc import Callable

from memplan.families import written_once
from memplan.families.counted import (
    CLASSIFIED,
    attention,
    classifier,
    counted_model,
    encoder_layer,
    feed_forward,
    masked_lm_head,
    square,
)
from memplan.families.reading_both_ways.encoders import positions_behind_padding
from memplan.families.request import ReadRequest, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

WORDS = "word_embeddings"
"""The token table, which the output matrix is tied to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What every one of them reads."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    inner_size: int
    num_heads: int
    num_layers: int
    num_positions: int
    num_labels: int
    tied: bool


Part = Callable[[ParameterTable, ConfigReader, Sizes], None]
"""Declares some of a model's weights."""
Head = Callable[[ParameterTable, ConfigReader, Sizes, Task], None]
"""Declares what a task adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How one type is made (transformers 5.23, the class's modelling file)."""

    body: Part
    head: Head
    pooler_tasks: frozenset[Task] = frozenset(Task)
    """Tasks whose class has a pooler."""
    positions_from_ids: bool = False
    """Positions start behind the padding token's, as RoBERTa's do."""
    tasks: tuple[Task, ...] = (Task.MASKED_LM, Task.BASE, *CLASSIFIED, Task.MULTIPLE_CHOICE)
    """The first is what a bare ``...Model`` is read as."""
    in_class: tuple[Task, ...] = ()
    """Tasks with which it is written as a class, and not counted."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``FORMS``."""
    form = FORMS[request.model_type]
    task = reject_task(reader, request, *form.tasks)
    if task in form.in_class:
        return written_once.read(reader, request)
    sizes = _sizes(reader, request)

    def declare(table: ParameterTable, task: Task) -> None:
        form.body(table, reader, sizes)
        with table.block("head"):
            if task in form.pooler_tasks:
                square(table, "pooler.dense", sizes.hidden_size)
            form.head(table, reader, sizes, task)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size,
        context_length=_context_length(reader, form, sizes),
        tied=sizes.tied,
    )  # fmt: skip


def _context_length(reader: ConfigReader, form: Form, sizes: Sizes) -> int:
    if form.positions_from_ids:
        return positions_behind_padding(reader)
    return sizes.num_positions


def _sizes(reader: ConfigReader, request: ReadRequest) -> Sizes:
    hidden_size = reader.integer("hidden_size", "d_model")
    embedding_size = reader.optional_integer("embedding_size")
    num_heads = 1
    if reader.raw("num_attention_heads") is not None:
        num_heads = reader.integer("num_attention_heads")
        reader.divide("hidden_size", hidden_size, "num_attention_heads", num_heads)
    blocks = reader.integers("block_sizes", minimum=1)
    return Sizes(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        embedding_size=hidden_size if embedding_size is None else embedding_size,
        inner_size=reader.integer("intermediate_size", "d_inner"),
        num_heads=num_heads,
        num_layers=sum(blocks) if blocks else reader.layers("num_hidden_layers", "n_layer"),
        num_positions=reader.integer("max_position_embeddings", default=512),
        num_labels=request.labels(reader),
        tied=reader.flag("tie_word_embeddings", default=True),
    )


# -- parts that several types share --------------------------------------------------------------


def _embeddings(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """Tokens, positions, types and a norm on their sum, all as wide as ``embedding_size``."""
    width = sizes.embedding_size
    table.embedding(WORDS, sizes.vocab_size, width)
    table.embedding("position_embeddings", sizes.num_positions, width)
    types = reader.integer("type_vocab_size", minimum=0)
    if types:
        table.embedding("token_type_embeddings", types, width)
    table.norm("embed_norm", width)


def _masked_lm(table: ParameterTable, sizes: Sizes, same_as: str = f"{WORDS}.weight") -> None:
    masked_lm_head(table, sizes.hidden_size, sizes.vocab_size, same_as, spare_bias=not sizes.tied)


def _plain_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """BERT's heads: one linear layer to the classes."""
    del reader
    if task is Task.MASKED_LM:
        _masked_lm(table, sizes)
    elif task is not Task.BASE:
        classifier(table, task, sizes.hidden_size, sizes.num_labels)


def _dense_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """RoBERTa's heads: a sequence classifier has a dense layer more."""
    if task is Task.SEQUENCE_CLASSIFICATION:
        classifier(table, task, sizes.hidden_size, sizes.num_labels, dense=True)
    else:
        _plain_head(table, reader, sizes, task)


def _next_sentence(table: ParameterTable, sizes: Sizes) -> None:
    """Which of two sentences follows: two classes of BERT's pretraining."""
    table.linear("seq_relationship", sizes.hidden_size, 2)


# -- BigBird and Longformer ------------------------------------------------------------------------


def _big_bird(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """``use_bias`` is that of queries, keys and values alone (``BigBirdSelfAttention``)."""
    bias = reader.flag("use_bias")
    with table.block("embed"):
        _embeddings(table, reader, sizes)
    with table.block("encoder.layers", count=sizes.num_layers):
        attention(table, "self_attn", sizes.hidden_size, bias=bias, output_bias=True)
        table.norm("self_attn_layer_norm", sizes.hidden_size)
        feed_forward(table, sizes.hidden_size, sizes.inner_size)
        table.norm("final_layer_norm", sizes.hidden_size)


def _big_bird_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """Its question answering head is a feed-forward network before the classes."""
    if task is Task.PRETRAINING:
        _masked_lm(table, sizes)
        _next_sentence(table, sizes)
        return
    if task is Task.QUESTION_ANSWERING:
        feed_forward(table, sizes.hidden_size, sizes.inner_size, name="qa_classifier")
        table.norm("qa_classifier.norm", sizes.hidden_size)
    _dense_head(table, reader, sizes, task)


def _longformer(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """Global tokens have queries, keys and values of their own."""
    with table.block("embed"):
        _embeddings(table, reader, sizes)
    with table.block("encoder.layers", count=sizes.num_layers):
        encoder_layer(table, sizes.hidden_size, sizes.inner_size)
        for name in ("query_global", "key_global", "value_global"):
            square(table, f"self_attn.{name}", sizes.hidden_size)


# -- Funnel: Transformer-XL's attention --------------------------------------------------


def _funnel_layer(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """``FunnelRelMultiheadAttention`` owns its biases and the positions' kernel itself."""
    hidden, heads = sizes.hidden_size, sizes.num_heads
    head_dim = reader.integer("d_head")
    width = heads * head_dim
    for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
        table.parameter("self_attn", name, heads, head_dim)
    table.parameter("self_attn", "r_kernel", hidden, heads, head_dim)
    table.parameter("self_attn", "seg_embed", 2, heads, head_dim)
    table.linear("self_attn.q_proj", hidden, width, bias=False)
    table.linear("self_attn.k_proj", hidden, width)
    table.linear("self_attn.v_proj", hidden, width)
    table.linear("self_attn.o_proj", width, hidden)
    table.norm("self_attn_layer_norm", hidden)
    feed_forward(table, hidden, sizes.inner_size)
    table.norm("final_layer_norm", hidden)


def _funnel(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """``block_repeats`` run layers again: they add no weights."""
    with table.block("embed"):
        table.embedding(WORDS, sizes.vocab_size, sizes.hidden_size)
        table.norm("embed_norm", sizes.hidden_size)
    with table.block("encoder.layers", count=sizes.num_layers):
        _funnel_layer(table, reader, sizes)


def _bare_output(table: ParameterTable, sizes: Sizes) -> None:
    """An output matrix with a bias, and nothing before it."""
    table.tied("lm_head", f"{WORDS}.weight", sizes.vocab_size, sizes.hidden_size)
    table.parameter("lm_head", "bias", sizes.vocab_size)


def _funnel_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """Classes of whole sequences have no decoder, and a dense layer (``FunnelBaseModel``)."""
    whole = task in {Task.SEQUENCE_CLASSIFICATION, Task.MULTIPLE_CHOICE}
    if not whole:
        count = reader.integer("num_decoder_layers", minimum=0)
        with table.block("decoder.layers", count=count):
            _funnel_layer(table, reader, sizes)
    if task is Task.MASKED_LM:
        _bare_output(table, sizes)
    elif task is Task.PRETRAINING:
        square(table, "discriminator.dense", sizes.hidden_size)
        table.linear("discriminator.dense_prediction", sizes.hidden_size, 1)
    elif task is not Task.BASE:
        classifier(table, task, sizes.hidden_size, sizes.num_labels, dense=whole)


_NO_POOLER: frozenset[Task] = frozenset()
_UNPOOLED = (Task.MASKED_LM, Task.BASE, *CLASSIFIED)

FORMS: dict[str, Form] = {
    "big_bird": Form(
        body=_big_bird,
        head=_big_bird_head,
        pooler_tasks=frozenset({Task.BASE, Task.MULTIPLE_CHOICE}),
        tasks=(*_UNPOOLED, Task.MULTIPLE_CHOICE, Task.PRETRAINING),
        in_class=(
            Task.MASKED_LM,
            Task.BASE,
            Task.SEQUENCE_CLASSIFICATION,
            Task.TOKEN_CLASSIFICATION,
            Task.PRETRAINING,
        ),
    ),
    "longformer": Form(
        positions_from_ids=True,
        body=_longformer,
        head=_dense_head,
        pooler_tasks=frozenset({Task.BASE, Task.MULTIPLE_CHOICE}),
        in_class=(Task.MASKED_LM, Task.BASE, Task.TOKEN_CLASSIFICATION),
    ),
    "funnel": Form(
        body=_funnel,
        head=_funnel_head,
        pooler_tasks=_NO_POOLER,
        tasks=(*_UNPOOLED, Task.MULTIPLE_CHOICE, Task.PRETRAINING),
    ),
}
