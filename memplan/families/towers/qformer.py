"""Q-Former: a BERT whose queries read an encoder's output in every so-manieth layer (BLIP-2).

Classes of transformers 5.23: ``Blip2QFormerModel`` and ``InstructBlipQFormerModel``.
"""

from memplan.families.towers.blocks import perceptron
from memplan.families.towers.parts import attention
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def qformer(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    embeds_text: bool = False,
    reads_text: bool = False,
) -> None:
    """Layers with and without cross attention.

    ``embeds_text``: it has a token table of its own (InstructBLIP); ``reads_text``: tokens beside
    the queries pass a feed-forward network of theirs.
    """
    size, inner = reader.integer("hidden_size"), reader.integer("intermediate_size")
    with table.block(f"{name}.embed"):
        if embeds_text:
            table.embedding("word_embeddings", reader.integer("vocab_size"), size)
            positions = reader.integer("max_position_embeddings")
            table.embedding("position_embeddings", positions, size)
        table.norm("layernorm", size)
    count = reader.layers("num_hidden_layers")
    every = reader.integer("cross_attention_frequency")
    reading = -(-count // every)
    for part, number in (("reading_layers", reading), ("layers", count - reading)):
        with table.block(f"{name}.{part}", count=number):
            attention(table, "attention", size)
            table.norm("attention.output.norm", size)
            if part == "reading_layers":
                source = reader.integer("encoder_hidden_size")
                attention(table, "crossattention", size, source=source)
                table.norm("crossattention.output.norm", size)
            for kind in ("query", "text") if reads_text else ("query",):
                perceptron(table, f"mlp_{kind}", size, inner)
                table.norm(f"mlp_{kind}.norm", size)
