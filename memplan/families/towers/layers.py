"""Layers that towers share."""

from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.layers import LayerBody


def tower_activation(reader: ConfigReader, key: str, *, default: str = "gelu") -> Activation:
    """A tower's nonlinearity, by transformers' name."""
    known = {each.value: each for each in Activation}
    name = reader.text(key, default=default)
    return known[reader.choice(key, _ACTIVATION_NAMES.get(name, name), known)]


_ACTIVATION_NAMES = {"gelu_pytorch": "gelu", "swish": "silu"}


def encoder_attention(
    reader: ConfigReader,
    size: int,
    *,
    bias: bool = True,
    dropout: float = 0.0,
    causal: bool = False,
    fp32_softmax: bool = True,
) -> AttentionSpec:
    """Heads that see one another on both sides, each with as many keys as queries."""
    heads = reader.integer("num_attention_heads")
    width = reader.integer("head_dim", default=max(1, size // heads))
    return AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=width, query_bias=bias, key_bias=bias,
        value_bias=bias, output_bias=True, causal=causal, dropout=dropout,
        fp32_softmax=fp32_softmax,
    )  # fmt: skip


def transformer(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    causal: bool = False,
    count: int = 0,
    cuts_together: bool = False,
) -> None:
    """A stack of equal layers: attention and a feed-forward network, all with biases and norms."""
    size = reader.integer("hidden_size")
    body = LayerBody(
        size=size, inner_size=reader.integer("intermediate_size"),
        attention=encoder_attention(
            reader, size, dropout=reader.number("attention_dropout", default=0.0), causal=causal
        ),
        activation=tower_activation(reader, "hidden_act"), cuts_together=cuts_together,
    )  # fmt: skip
    count = count or reader.layers("num_hidden_layers")
    with table.block(f"{name}.layers", count=count, body=body):
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            table.linear(f"self_attn.{projection}", size, size)
        table.norm("layer_norm1", size)
        perceptron(table, "mlp", size, reader.integer("intermediate_size"))
        table.norm("layer_norm2", size)


def in_place_attention(table: ParameterTable, name: str, size: int) -> None:
    """``torch.nn.MultiheadAttention``, which owns the three projections as one weight."""
    table.parameter(name, "in_proj_weight", 3 * size, size)
    table.parameter(name, "in_proj_bias", 3 * size)
    table.linear(f"{name}.out_proj", size, size)


def perceptron(table: ParameterTable, name: str, size: int, inner_size: int) -> None:
    """Two linear layers with biases."""
    table.linear(f"{name}.fc1", size, inner_size)
    table.linear(f"{name}.fc2", inner_size, size)
