"""Perceiver, on text, counted: few latent vectors attend to many tokens."""

from memplan.families.counted import counted_model, feed_forward
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

DECODER_KEY_WIDTH = 256
"""Of the decoder's queries and keys: 8 heads of 32 (``PerceiverForMaskedLM.__init__``)."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config; the base model has neither the tokens' table nor the decoder."""
    task = reject_task(reader, request, Task.MASKED_LM, Task.BASE)
    width = reader.integer("d_model")
    positions = reader.integer("max_position_embeddings")

    def declare(table: ParameterTable, task: Task) -> None:
        if task is not Task.BASE:
            with table.block("embed"):
                table.embedding("embeddings", reader.integer("vocab_size"), width)
                table.embedding("position_embeddings", positions, width)
        _encoder(table, reader, width)
        if task is not Task.BASE:
            _decoder(table, reader, width, positions)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=width,
        context_length=positions, tied=False,
    )  # fmt: skip


def _encoder(table: ParameterTable, reader: ConfigReader, width: int) -> None:
    """One layer that reads the tokens, then a block of layers, which may be run several times."""
    latents = reader.integer("d_latents")
    shape = reader.text("cross_attention_shape_for_attention")
    wide = {"q": latents, "kv": width}
    reader.choice("cross_attention_shape_for_attention", shape, wide)
    keys = reader.optional_integer("qk_channels")
    values = reader.optional_integer("v_channels")
    with table.block("latents.embed"):
        table.parameter("latents", "latents", reader.integer("num_latents"), latents)
    with table.block("encoder.cross_attention"):
        first = keys or wide[shape]
        _layer(
            table, latents, width, first, values or first,
            factor=reader.integer("cross_attention_widening_factor"),
        )  # fmt: skip
    with table.block("encoder.layers", count=reader.layers("num_self_attends_per_block")):
        _layer(
            table, latents, None, keys or latents, values or keys or latents,
            factor=reader.integer("self_attention_widening_factor"),
        )  # fmt: skip


def _decoder(table: ParameterTable, reader: ConfigReader, width: int, positions: int) -> None:
    """A query for each position reads the latents; logits come from the tokens' table."""
    with table.block("decoder"):
        table.parameter("output_position_encodings", "position_embeddings", positions, width)
        _layer(table, width, reader.integer("d_latents"), DECODER_KEY_WIDTH, width, factor=1)
    with table.block("head"):
        table.parameter("embedding_decoder", "bias", reader.integer("vocab_size"))


def _layer(
    table: ParameterTable, queries: int, source: int | None, keys: int, values: int, *, factor: int
) -> None:
    """Attention to oneself, or to a ``source`` of another width, and a feed-forward network."""
    name = "self_attn" if source is None else "cross_attn"
    table.norm(f"{name}.queries_norm", queries)
    if source is not None:
        table.norm(f"{name}.source_norm", source)
    inputs = queries if source is None else source
    table.linear(f"{name}.q_proj", queries, keys)
    table.linear(f"{name}.k_proj", inputs, keys)
    table.linear(f"{name}.v_proj", inputs, values)
    table.linear(f"{name}.o_proj", values, queries if source is not None else values)
    table.norm("layernorm", queries)
    feed_forward(table, queries, factor * queries)
