"""Decision Transformer: GPT-2's layers over returns, states and actions, counted only."""

from memplan.families.counted import counted_model
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a Decision Transformer's config."""
    hidden_size = reader.integer("hidden_size")

    def declare(table: ParameterTable, _: Task) -> None:
        with table.block("encoder.layers", count=reader.layers("n_layer")):
            _layer(table, reader, hidden_size)
        with table.block("embeddings"):
            _embeddings(table, reader, hidden_size)

    return counted_model(
        reader,
        request,
        declare,
        task=reject_task(reader, request, Task.BASE),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=reader.integer("n_positions"),
        tied=False,
    )


def _layer(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    inner = reader.integer("n_inner", default=4 * size)
    table.norm("ln_1", size)
    table.linear("attn.c_attn", size, 3 * size)
    table.linear("attn.c_proj", size, size)
    table.norm("ln_2", size)
    if reader.flag("add_cross_attention"):
        table.linear("crossattention.c_attn", size, 2 * size)
        table.linear("crossattention.q_attn", size, size)
        table.linear("crossattention.c_proj", size, size)
        table.norm("ln_cross_attn", size)
    table.linear("mlp.c_fc", size, inner)
    table.linear("mlp.c_proj", inner, size)


def _embeddings(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """What goes in and comes out, and GPT-2's own tables, which are made but not used."""
    states, actions = reader.integer("state_dim"), reader.integer("act_dim")
    table.embedding("encoder.wte", reader.integer("vocab_size"), size)
    table.embedding("encoder.wpe", reader.integer("n_positions"), size)
    table.norm("encoder.ln_f", size)
    table.embedding("embed_timestep", reader.integer("max_ep_len"), size)
    table.norm("embed_ln", size)
    for name, features in (("return", 1), ("state", states), ("action", actions)):
        table.linear(f"embed_{name}", features, size)
        table.linear(f"predict_{name}", size, features)
