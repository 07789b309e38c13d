"""Layers that towers share."""

from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def transformer(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """A stack of equal layers: attention and a feed-forward network, all with biases and norms."""
    size = reader.integer("hidden_size")
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers")):
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
