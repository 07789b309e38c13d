"""Perceiver, on text: few latent vectors attend to many tokens."""

from dataclasses import replace

from memplan.families.counted import counted_model, feed_forward
from memplan.families.request import ReadRequest, reject_task
from memplan.families.towers.layers import tower_activation
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task
from memplan.model.towers.body import CallBody, ChainBody, ResidualBody
from memplan.model.towers.gridded.grids import ForgottenBody
from memplan.model.towers.latents import PlacedTokensBody, QueriesBody, ReadingBody, SpellingBody
from memplan.model.towers.parts import ActivationBody, LinearBody, NormBody

DECODER_KEY_WIDTH = 256
"""Of the decoder's queries and keys: 8 heads of 32 (``PerceiverForMaskedLM.__init__``)."""
DECODER_HEADS = 8


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config; the base model has neither the tokens' table nor the decoder."""
    task = reject_task(reader, request, Task.MASKED_LM, Task.BASE)
    width = reader.integer("d_model")
    positions = reader.integer("max_position_embeddings")

    def declare(table: ParameterTable, task: Task) -> None:
        spells = task is not Task.BASE
        if spells:
            body = PlacedTokensBody(
                size=width, length=positions, tokens="embeddings", positions="position_embeddings"
            )
            with table.block("embed", body=body):
                table.embedding("embeddings", reader.integer("vocab_size"), width)
                table.embedding("position_embeddings", positions, width)
        # What a bare model reads is its caller's; of blocks that run twice, only the weights are known.
        written = spells and reader.integer("num_blocks", default=1) == 1
        _encoder(table, reader, width, written=written)
        if spells:
            _decoder(table, reader, width, positions)

    model = counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=width,
        context_length=positions, tied=False,
    )  # fmt: skip
    return replace(model, recomputes=False)


def _encoder(table: ParameterTable, reader: ConfigReader, width: int, *, written: bool) -> None:
    """One layer that reads the tokens, then a block of layers, which may be run several times."""
    latents = reader.integer("d_latents")
    shape = reader.text("cross_attention_shape_for_attention")
    wide = {"q": latents, "kv": width}
    reader.choice("cross_attention_shape_for_attention", shape, wide)
    keys = reader.optional_integer("qk_channels")
    values = reader.optional_integer("v_channels")
    with table.block("encoder.cross_attention"):
        table.parameter("latents", "latents", reader.integer("num_latents"), latents)
        first = keys or wide[shape]
        layer = _layer(
            table, reader, latents, width, first, values or first,
            factor=reader.integer("cross_attention_widening_factor"),
            heads=reader.integer("num_cross_attention_heads"),
            added=reader.flag("use_query_residual", default=True),
        )  # fmt: skip
        asked = ChainBody(parts=(QueriesBody(weight="latents.latents"), *layer.parts))
        table.computes(asked if written else None)
    with table.block("encoder.layers", count=reader.layers("num_self_attends_per_block")):
        _layer(
            table, reader, latents, None, keys or latents, values or keys or latents,
            factor=reader.integer("self_attention_widening_factor"),
            heads=reader.integer("num_self_attention_heads"), added=True,
        )  # fmt: skip


def _decoder(table: ParameterTable, reader: ConfigReader, width: int, positions: int) -> None:
    """A query for each position reads the latents; logits come from the tokens' table."""
    weight = "output_position_encodings.position_embeddings"
    with table.block("decoder"):
        table.parameter("output_position_encodings", "position_embeddings", positions, width)
        layer = _layer(
            table, reader, width, reader.integer("d_latents"), DECODER_KEY_WIDTH, width, factor=1,
            heads=DECODER_HEADS, added=False,
        )  # fmt: skip
        # The model inside returns behind it, and lets the tokens go.
        held = (ForgottenBody(),) * 2
        table.computes(ChainBody(parts=(*held, QueriesBody(weight=weight), *layer.parts)))
    rows = reader.integer("vocab_size")
    spelled = SpellingBody(rows=rows, table="embeddings", bias="embedding_decoder.bias")
    with table.block("head", body=ChainBody(parts=(spelled, ForgottenBody()))):
        table.parameter("embedding_decoder", "bias", rows)


def _layer(
    table: ParameterTable,
    reader: ConfigReader,
    queries: int,
    source: int | None,
    keys: int,
    values: int,
    *,
    factor: int,
    heads: int,
    added: bool,
) -> ChainBody:
    """Attention to oneself, or to a ``source`` of another width, and a feed-forward network."""
    name = "self_attn" if source is None else "cross_attn"
    table.norm(f"{name}.queries_norm", queries)
    if source is not None:
        table.norm(f"{name}.source_norm", source)
    inputs = queries if source is None else source
    table.linear(f"{name}.q_proj", queries, keys)
    table.linear(f"{name}.k_proj", inputs, keys)
    table.linear(f"{name}.v_proj", inputs, values)
    outputs = queries if source is not None else values
    table.linear(f"{name}.o_proj", values, outputs)
    table.norm("layernorm", queries)
    feed_forward(table, queries, factor * queries)
    read = ReadingBody(
        module=name, size=queries, source=source or 0, key_width=keys, value_width=values,
        outputs=outputs, num_heads=heads, added=added,
        dropout=reader.number("attention_probs_dropout_prob", default=0.1),
    )  # fmt: skip
    inner = factor * queries
    network = CallBody(
        parts=(
            LinearBody(module="mlp.up_proj", inputs=queries, outputs=inner),
            ActivationBody(activation=tower_activation(reader, "hidden_act")),
            LinearBody(module="mlp.down_proj", inputs=inner, outputs=queries),
        )
    )
    fed = ResidualBody(branch=(NormBody(module="layernorm", size=queries), network))
    made = ChainBody(parts=(read, fed))
    table.computes(made)
    return made
