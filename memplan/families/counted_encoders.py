"""Encoders that are counted: their attention, convolutions or mixing are not written down.

Of Funnel classes of whole sequences; of BigBird, ConvBERT, Longformer, LUKE, SqueezeBERT, FNet, X-MOD and
XLNet the tasks
that BERT's heads do not cover. Each class adds its own weights to BERT's layer or replaces parts of it;
a row of ``FORMS`` says how.
"""

from collections.abc import Callable

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
from memplan.families.encoders import Variation, positions_for_tokens
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


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``FORMS``."""
    form = FORMS[request.model_type]
    task = reject_task(reader, request, *form.tasks)
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
        return positions_for_tokens(reader, Variation(positions_from_ids=True))
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


# -- X-MOD ------------------------------------------------------------------------------------------


def _xmod(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """Every layer has an adapter for each language; which one a sequence passes depends on it."""
    hidden, factor = sizes.hidden_size, reader.integer("adapter_reduction_factor")
    narrow = hidden // factor
    if not narrow:
        key = "adapter_reduction_factor"
        raise reader.fail(key, f"leaves nothing of {hidden} dimensions")
    with table.block("embed"):
        _embeddings(table, reader, sizes)
    with table.block("encoder.layers", count=sizes.num_layers):
        encoder_layer(table, hidden, sizes.inner_size)
        if reader.flag("adapter_layer_norm"):
            table.norm("adapter_layer_norm", hidden)
    with table.block("encoder.adapters", count=sizes.num_layers * len(languages(reader))):
        feed_forward(table, hidden, narrow, name="adapter")
    with table.block("encoder.norm"):
        if reader.flag("pre_norm"):
            table.norm("layer_norm", hidden)


def languages(reader: ConfigReader) -> list[str]:
    """X-MOD's languages; each has an adapter in every layer."""
    found = reader.texts("languages")
    if not found:
        key = "languages"
        raise reader.fail(key, "is empty; name at least one")
    return found


# -- LUKE ------------------------------------------------------------------------------------------

ENTITIES = "entity_embeddings"


def _luke(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """A table of entities beside the words', and queries for each pair of the two."""
    hidden, width = sizes.hidden_size, reader.integer("entity_emb_size")
    with table.block("embed"):
        _embeddings(table, reader, sizes)
    with table.block("entities.embed"):
        table.embedding(ENTITIES, reader.integer("entity_vocab_size"), width)
        if width != hidden:
            table.linear("entity_embedding_dense", width, hidden, bias=False)
        table.embedding("position_embeddings", sizes.num_positions, hidden)
        table.embedding("token_type_embeddings", reader.integer("type_vocab_size"), hidden)
        table.norm("embed_norm", hidden)
    with table.block("encoder.layers", count=sizes.num_layers):
        encoder_layer(table, hidden, sizes.inner_size)
        if reader.flag("use_entity_aware_attention"):
            for name in ("w2e_query", "e2w_query", "e2e_query"):
                square(table, f"self_attn.{name}", hidden)


def _luke_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """The words' output matrix is never tied; the entities' is (``_tied_weights_keys``)."""
    if task is not Task.MASKED_LM:
        _plain_head(table, reader, sizes, task)
        return
    hidden, width = sizes.hidden_size, reader.integer("entity_emb_size")
    count = reader.integer("entity_vocab_size")
    _masked_lm(table, sizes, same_as="")
    table.linear("entity_predictions.transform.dense", hidden, width)
    table.norm("entity_predictions.transform.norm", width)
    table.tied("entity_predictions.decoder", f"{ENTITIES}.weight", count, width)
    table.parameter("entity_predictions", "bias", count)


# -- ConvBERT, SqueezeBERT and FNet -----------------------------------------------------------------


def _convbert(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """Half of the heads attend, the other half convolve with kernels that they make."""
    hidden, ratio = sizes.hidden_size, reader.integer("head_ratio")
    kernel, groups = reader.integer("conv_kernel_size"), reader.integer("num_groups")
    num_heads = max(sizes.num_heads // ratio, 1)
    width = reader.divide("hidden_size", hidden, "num_attention_heads", num_heads) // 2 * num_heads
    with table.block("embed"):
        _embeddings(table, reader, sizes)
        if sizes.embedding_size != hidden:
            table.linear("projection", sizes.embedding_size, hidden)
    with table.block("encoder.layers", count=sizes.num_layers):
        for name in ("q_proj", "k_proj", "v_proj", "conv_out"):
            table.linear(f"self_attn.{name}", hidden, width)
        table.linear("self_attn.conv_kernel", width, num_heads * kernel)
        table.parameter("self_attn.key_conv", "bias", width, 1)
        table.convolution(
            "self_attn.key_conv.depthwise", hidden, hidden, kernel, groups=hidden, bias=False
        )
        table.convolution("self_attn.key_conv.pointwise", hidden, width, 1, bias=False)
        _output_projection(table, reader, hidden, 2 * width if num_heads == 1 else hidden)
        _grouped(table, reader, "mlp.up_proj", hidden, sizes.inner_size, groups)
        _grouped(table, reader, "mlp.down_proj", sizes.inner_size, hidden, groups)
        table.norm("self_attn_layer_norm", hidden)
        table.norm("final_layer_norm", hidden)


def _output_projection(
    table: ParameterTable, reader: ConfigReader, hidden: int, joined: int
) -> None:
    """What attention and convolution join to must be as wide as the hidden states."""
    if joined != hidden:
        key = "hidden_size"
        raise reader.fail(key, f"{hidden} is odd, but its heads are halved")
    square(table, "self_attn.o_proj", hidden)


def _grouped(
    table: ParameterTable, reader: ConfigReader, name: str, inputs: int, outputs: int, groups: int
) -> None:
    """A linear layer of ``num_groups`` blocks (``GroupedLinearLayer``)."""
    rows = reader.divide("hidden_size", inputs, "num_groups", groups)
    columns = reader.divide("intermediate_size", outputs, "num_groups", groups)
    table.parameter(name, "weight", groups, rows, columns)
    table.parameter(name, "bias", outputs)


def _convbert_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """Predictions are made in the width of the embeddings, as ELECTRA's generator makes them."""
    if task is not Task.MASKED_LM:
        _dense_head(table, reader, sizes, task)
        return
    masked_lm_head(
        table, sizes.hidden_size, sizes.vocab_size, f"{WORDS}.weight", width=sizes.embedding_size
    )


def _squeezebert(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """Every linear layer is a grouped convolution of length 1."""
    hidden, inner = sizes.hidden_size, sizes.inner_size
    if sizes.embedding_size != hidden:
        key = "embedding_size"
        raise reader.fail(key, f"must be the hidden_size ({hidden}) in this class")
    layers = (
        ("self_attn.q_proj", hidden, hidden, "q_groups"),
        ("self_attn.k_proj", hidden, hidden, "k_groups"),
        ("self_attn.v_proj", hidden, hidden, "v_groups"),
        ("self_attn.o_proj", hidden, hidden, "post_attention_groups"),
        ("mlp.up_proj", hidden, inner, "intermediate_groups"),
        ("mlp.down_proj", inner, hidden, "output_groups"),
    )
    with table.block("embed"):
        _embeddings(table, reader, sizes)
    with table.block("encoder.layers", count=sizes.num_layers):
        for name, inputs, outputs, key in layers:
            groups = reader.integer(key)
            for size in (inputs, outputs):
                reader.divide(key, size, key, groups)
            table.convolution(name, inputs, outputs, 1, groups=groups)
        table.norm("self_attn_layer_norm", hidden)
        table.norm("final_layer_norm", hidden)


def _fnet(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """A Fourier transform stands in for attention."""
    hidden = sizes.hidden_size
    with table.block("embed"):
        _embeddings(table, reader, sizes)
        square(table, "projection", hidden)
    with table.block("encoder.layers", count=sizes.num_layers):
        table.norm("fourier_layer_norm", hidden)
        feed_forward(table, hidden, sizes.inner_size)
        table.norm("final_layer_norm", hidden)


def _fnet_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    if task is Task.PRETRAINING:
        _masked_lm(table, sizes)
        _next_sentence(table, sizes)
    else:
        _plain_head(table, reader, sizes, task)


# -- Funnel and XLNet: Transformer-XL's attention --------------------------------------------------


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


def _xlnet(table: ParameterTable, reader: ConfigReader, sizes: Sizes) -> None:
    """``XLNetRelativeAttention`` owns all of its projections itself, without biases."""
    hidden, heads = sizes.hidden_size, sizes.num_heads
    head_dim = reader.divide("d_model", hidden, "n_head", heads)
    with table.block("embed"):
        table.parameter("transformer", "mask_emb", 1, 1, hidden)
        table.embedding(WORDS, sizes.vocab_size, hidden)
    with table.block("decoder.layers", count=sizes.num_layers):
        for name in ("q", "k", "v", "o", "r"):
            table.parameter("self_attn", name, hidden, heads, head_dim)
        for name in ("r_r_bias", "r_s_bias", "r_w_bias"):
            table.parameter("self_attn", name, heads, head_dim)
        table.parameter("self_attn", "seg_embed", 2, heads, head_dim)
        table.norm("self_attn_layer_norm", hidden)
        feed_forward(table, hidden, sizes.inner_size)
        table.norm("final_layer_norm", hidden)


def _xlnet_head(table: ParameterTable, reader: ConfigReader, sizes: Sizes, task: Task) -> None:
    """A sequence classifier summarizes through a dense layer (``XLNetSequenceSummary``)."""
    if task is Task.CAUSAL_LM:
        _bare_output(table, sizes)
    elif task is not Task.BASE:
        dense = reader.flag("summary_use_proj", default=True)
        classifier(table, task, sizes.hidden_size, sizes.num_labels, dense=dense)


_NO_POOLER: frozenset[Task] = frozenset()
_POOLED_CLASSES = frozenset({Task.BASE, Task.SEQUENCE_CLASSIFICATION, Task.MULTIPLE_CHOICE})
_UNPOOLED = (Task.MASKED_LM, Task.BASE, *CLASSIFIED)

FORMS: dict[str, Form] = {
    "big_bird": Form(
        body=_big_bird,
        head=_big_bird_head,
        pooler_tasks=frozenset(Task) - {Task.QUESTION_ANSWERING},
        tasks=(*_UNPOOLED, Task.MULTIPLE_CHOICE, Task.PRETRAINING),
    ),
    "longformer": Form(
        positions_from_ids=True,
        body=_longformer,
        head=_dense_head,
        pooler_tasks=frozenset({Task.BASE, Task.MULTIPLE_CHOICE}),
    ),
    "xmod": Form(
        positions_from_ids=True,
        body=_xmod,
        head=_dense_head,
        pooler_tasks=frozenset({Task.BASE, Task.MULTIPLE_CHOICE}),
    ),
    "luke": Form(
        positions_from_ids=True,
        body=_luke,
        head=_luke_head,
        pooler_tasks=_POOLED_CLASSES | {Task.MASKED_LM},
    ),
    "convbert": Form(
        body=_convbert,
        head=_convbert_head,
        pooler_tasks=_NO_POOLER,
        tasks=_UNPOOLED,
    ),
    "squeezebert": Form(body=_squeezebert, head=_plain_head),
    "fnet": Form(
        body=_fnet,
        head=_fnet_head,
        tasks=(*_UNPOOLED, Task.MULTIPLE_CHOICE, Task.PRETRAINING),
    ),
    "funnel": Form(
        body=_funnel,
        head=_funnel_head,
        pooler_tasks=_NO_POOLER,
        tasks=(*_UNPOOLED, Task.MULTIPLE_CHOICE, Task.PRETRAINING),
    ),
    "xlnet": Form(
        body=_xlnet,
        head=_xlnet_head,
        pooler_tasks=_NO_POOLER,
        tasks=(
            Task.CAUSAL_LM,
            Task.BASE,
            Task.SEQUENCE_CLASSIFICATION,
            Task.TOKEN_CLASSIFICATION,
            Task.MULTIPLE_CHOICE,
        ),
    ),
}
