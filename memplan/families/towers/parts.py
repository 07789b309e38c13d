"""Parts of a transformer's layer as towers declare them: attention, perceptrons, a whole layer."""

from memplan.model.parameters import ParameterTable


def attention(
    table: ParameterTable,
    name: str,
    size: int,
    *,
    bias: bool = True,
    key_bias: bool | None = None,
    output_bias: bool = True,
    inner: int | None = None,
    source: int | None = None,
) -> None:
    """Queries, keys, values and output as four linear layers.

    ``inner`` is the width of all heads, ``source`` that of what keys and values are made from.
    """
    width = size if inner is None else inner
    given = size if source is None else source
    table.linear(f"{name}.q_proj", size, width, bias=bias)
    table.linear(f"{name}.k_proj", given, width, bias=bias if key_bias is None else key_bias)
    table.linear(f"{name}.v_proj", given, width, bias=bias)
    table.linear(f"{name}.o_proj", width, size, bias=output_bias)


def fused_attention(table: ParameterTable, name: str, size: int, *, bias: bool = True) -> None:
    """Queries, keys and values as one linear layer, and the output."""
    table.linear(f"{name}.qkv", size, 3 * size, bias=bias)
    table.linear(f"{name}.proj", size, size)


def multi_layer(
    table: ParameterTable, name: str, size: int, inner: int, out: int, num_layers: int
) -> None:
    """Linear layers one behind the other, all but the last as wide as ``inner``."""
    sizes = [size, *[inner] * (num_layers - 1), out]
    for index in range(num_layers):
        table.linear(f"{name}.layers.{index}", sizes[index], sizes[index + 1])
