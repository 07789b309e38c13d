"""LED, BigBird-Pegasus and ProphetNet: written as classes, but for some tasks, which are counted.

Of LED and BigBird-Pegasus those whose classes give tokens global attention by themselves or classify, of ProphetNet
its decoder alone, one without cross attention, and label smoothing. A row of ``VARIATIONS`` says which weights
each type has.
"""

from memplan.families import written_once
from memplan.families.counted import (
    CLASSIFIED,
    attention,
    classifier,
    counted_model,
    feed_forward,
    shared_table,
)
from memplan.families.request import ReadRequest, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """Which weights one type has (transformers 5.23, the class's modelling file)."""

    num_layers_keys: tuple[str, str] = ("encoder_layers", "decoder_layers")
    position_keys: tuple[str, str] = ("max_position_embeddings", "max_position_embeddings")
    embedding_norm: bool = True
    attention_bias: bool | None = True
    """None: as ``use_bias`` says."""
    global_projections: bool = False
    """The encoder's global tokens have queries, keys and values of their own (LED)."""
    future_tokens: bool = False
    """The decoder looks several tokens ahead (ProphetNet)."""
    tasks: tuple[Task, ...] = ()
    """Beside sequence-to-sequence and the base model."""


VARIATIONS: dict[str, Variation] = {
    "led": Variation(
        position_keys=("max_encoder_position_embeddings", "max_decoder_position_embeddings"),
        global_projections=True,
        tasks=(Task.QUESTION_ANSWERING,),
    ),
    "bigbird_pegasus": Variation(
        attention_bias=None,
        tasks=(Task.SEQUENCE_CLASSIFICATION, Task.QUESTION_ANSWERING),
    ),
    "prophetnet": Variation(
        num_layers_keys=("num_encoder_layers", "num_decoder_layers"), future_tokens=True
    ),
}

STACKS = ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackShape:
    """Sizes of an encoder or a decoder."""

    name: str
    vocab_size: int
    num_layers: int
    num_positions: int
    inner_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model, as the config gives them."""

    hidden_size: int
    stacks: tuple[StackShape, StackShape]
    bias: bool
    tied: bool
    num_labels: int
    num_future_tokens: int = 0
    future_width: int = 0
    """Outputs of the layer that scores relative positions: buckets times heads (ProphetNet)."""
    decoder_alone: bool = False
    cross_attention: bool = True


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``VARIATIONS``."""
    variation = VARIATIONS[request.model_type]
    if _is_class(reader, request, variation):
        return written_once.read(reader, request)
    shape = _shape(reader, request, variation)
    task = Task.OTHER
    if not shape.decoder_alone:
        task = reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE, *variation.tasks)

    def declare(table: ParameterTable, task: Task) -> None:
        _declare(table, shape, variation, task)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=shape.stacks[1].vocab_size, hidden_size=shape.hidden_size,
        context_length=reader.integer(*dict.fromkeys(variation.position_keys)),
        tied=shape.tied,
    )  # fmt: skip


def _is_class(reader: ConfigReader, request: ReadRequest, variation: Variation) -> bool:
    """Whether it is not counted."""
    if variation.future_tokens:
        alone = request.task is None and names_decoder(reader)
        smoothed = reader.number("eps", default=0.0) > 0.0
        return not (alone or smoothed) and reader.flag("add_cross_attention", default=True)
    tasks = Task.SEQ2SEQ_LM, Task.BASE
    return reject_task(reader, request, *tasks, *variation.tasks) in tasks


def _shape(reader: ConfigReader, request: ReadRequest, variation: Variation) -> Shape:
    hidden_size = reader.integer("d_model", "hidden_size")
    future = variation.future_tokens
    heads = reader.integer("num_decoder_attention_heads", "decoder_attention_heads")
    reader.divide("d_model", hidden_size, "decoder_attention_heads", heads)
    bias = variation.attention_bias
    tied = reader.flag("tie_word_embeddings", default=True)
    return Shape(
        hidden_size=hidden_size,
        stacks=(_stack(reader, variation, 0), _stack(reader, variation, 1)),
        bias=reader.flag("use_bias") if bias is None else bias,
        tied=tied,
        num_labels=request.labels(reader),
        num_future_tokens=reader.integer("ngram") if future else 0,
        future_width=reader.integer("num_buckets") * heads if future else 0,
        cross_attention=not future or reader.flag("add_cross_attention", default=True),
        decoder_alone=request.task is None and names_decoder(reader),
    )


def names_decoder(reader: ConfigReader) -> bool:
    """Whether the config is that of a decoder without its encoder."""
    return any(each.endswith("Decoder") for each in reader.texts("architectures"))


def _stack(reader: ConfigReader, variation: Variation, index: int) -> StackShape:
    name = STACKS[index]
    return StackShape(
        name=name,
        vocab_size=reader.integer("vocab_size"),
        num_layers=reader.layers(variation.num_layers_keys[index]),
        num_positions=reader.integer(variation.position_keys[index]),
        inner_size=reader.integer(f"{name}_ffn_dim"),
    )


def _declare(table: ParameterTable, shape: Shape, variation: Variation, task: Task) -> None:
    encoder, decoder = shape.stacks
    if task is Task.OTHER:
        _declare_tokens(table, "decoder", decoder, shape.hidden_size)
        _declare_stack(table, shape, variation, decoder)
        return
    shared_table(table, encoder.vocab_size, shape.hidden_size, STACKS, tied=shape.tied)
    for stack in shape.stacks:
        _declare_stack(table, shape, variation, stack)
    with table.block("head"):
        if task is Task.SEQ2SEQ_LM:
            table.tied("lm_head", "shared.weight", decoder.vocab_size, shape.hidden_size)
        if task in CLASSIFIED:
            classifier(table, task, shape.hidden_size, shape.num_labels, dense=True)


def _declare_tokens(table: ParameterTable, name: str, stack: StackShape, hidden_size: int) -> None:
    with table.block("embed"):
        table.embedding(name, stack.vocab_size, hidden_size)


def _declare_stack(
    table: ParameterTable, shape: Shape, variation: Variation, stack: StackShape
) -> None:
    hidden, decoder = shape.hidden_size, stack.name == "decoder"
    with table.block(f"{stack.name}.embed"):
        table.embedding("embed_positions", stack.num_positions, hidden)
        if shape.num_future_tokens and decoder:
            table.embedding("ngram_embeddings", shape.num_future_tokens, hidden)
        if variation.embedding_norm:
            table.norm("embed_norm", hidden)
    with table.block(f"{stack.name}.layers", count=stack.num_layers):
        if decoder:
            _declare_decoder_attention(table, shape)
        else:
            _declare_encoder_attention(table, shape, variation)
        feed_forward(table, hidden, stack.inner_size)
        table.norm("final_layer_norm", hidden)


def _declare_encoder_attention(table: ParameterTable, shape: Shape, variation: Variation) -> None:
    hidden = shape.hidden_size
    attention(table, "self_attn", hidden, bias=shape.bias)
    if variation.global_projections:
        for name in ("query_global", "key_global", "value_global"):
            table.linear(f"self_attn.{name}", hidden, hidden)
    table.norm("self_attn_layer_norm", hidden)


def _declare_decoder_attention(table: ParameterTable, shape: Shape) -> None:
    hidden = shape.hidden_size
    attention(table, "self_attn", hidden, bias=shape.bias)
    if shape.future_width:
        table.linear("self_attn.relative_positions", hidden, shape.future_width)
    table.norm("self_attn_layer_norm", hidden)
    if shape.cross_attention:
        attention(table, "cross_attn", hidden, bias=shape.bias)
        table.norm("cross_attn_layer_norm", hidden)
