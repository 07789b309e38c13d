"""A transformer layer of towers in its variants, and perceptrons behind it."""

from dataclasses import replace

from memplan.errors import ConfigError
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import LAYER_NORM, RMS_NORM


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerLayer:
    """The weights of a transformer layer: a norm, attention, a norm, a feed-forward network."""

    hidden_size: int
    intermediate_size: int
    width: int | None = None
    """Heads times their size, where it is not the hidden size."""
    key_value_width: int | None = None
    """The same for keys and values, where there are fewer heads."""
    fused: bool = False
    """Queries, keys and values come out of one linear layer."""
    attention_bias: bool = True
    key_bias: bool | None = None
    """Of the keys, where it differs (Whisper's have none)."""
    output_bias: bool | None = None
    """Of attention's output, where it differs."""
    head_norm_size: int = 0
    """Numbers under a norm on queries and one on keys; 0 for none."""
    head_norm_bias: bool = False
    norm_bias: bool = True
    """Layer norms have one, RMS norms have none."""
    gated: bool = False
    bias: bool = True
    """Of the feed-forward network."""
    layer_scales: int = 0
    """Vectors that scale what is added to the residual."""


def declare_layer(table: ParameterTable, layer: TowerLayer) -> None:
    """Declare one layer; the caller opens the block."""
    table.norm("layer_norm1", layer.hidden_size, bias=layer.norm_bias)
    declare_attention(table, layer)
    table.norm("layer_norm2", layer.hidden_size, bias=layer.norm_bias)
    perceptron(
        table, "mlp", layer.hidden_size, layer.intermediate_size, gated=layer.gated, bias=layer.bias
    )
    for number in range(layer.layer_scales):
        table.parameter("layer_scale", f"lambda_{number + 1}", layer.hidden_size)


def declare_attention(table: ParameterTable, layer: TowerLayer, name: str = "self_attn") -> None:
    """Projections of queries, keys, values and the output, and norms on heads."""
    hidden_size, bias = layer.hidden_size, layer.attention_bias
    width = layer.hidden_size if layer.width is None else layer.width
    narrow = width if layer.key_value_width is None else layer.key_value_width
    if layer.fused:
        table.linear(f"{name}.qkv", hidden_size, width + 2 * narrow, bias=bias)
    else:
        key_bias = bias if layer.key_bias is None else layer.key_bias
        table.linear(f"{name}.q_proj", hidden_size, width, bias=bias)
        table.linear(f"{name}.k_proj", hidden_size, narrow, bias=key_bias)
        table.linear(f"{name}.v_proj", hidden_size, narrow, bias=bias)
    output_bias = bias if layer.output_bias is None else layer.output_bias
    table.linear(f"{name}.out_proj", width, hidden_size, bias=output_bias)
    if layer.head_norm_size:
        table.norm(f"{name}.q_norm", layer.head_norm_size, bias=layer.head_norm_bias)
        table.norm(f"{name}.k_norm", layer.head_norm_size, bias=layer.head_norm_bias)


def perceptron(
    table: ParameterTable,
    name: str,
    in_features: int,
    inner_size: int,
    out_features: int | None = None,
    *,
    gated: bool = False,
    bias: bool = True,
) -> None:
    """Two linear layers, or three where a gate multiplies; by default back to where it began."""
    outputs = in_features if out_features is None else out_features
    if gated:
        table.linear(f"{name}.gate_proj", in_features, inner_size, bias=bias)
    table.linear(f"{name}.fc1", in_features, inner_size, bias=bias)
    table.linear(f"{name}.fc2", inner_size, outputs, bias=bias)


def declare_layers(
    table: ParameterTable,
    name: str,
    count: int,
    layer: TowerLayer,
    *,
    heads: int = 0,
    activation: Activation | None = None,
    body: LayerBody | None = None,
) -> None:
    """Declare a block of equal layers; with ``heads`` and an activation, what they compute.

    ``body`` says what is special about that; its sizes and names are the layer's.
    """
    made = None
    if heads and activation is not None:
        made = layer_body(layer, heads, activation, body)
    with table.block(name, count=count, body=made):
        declare_layer(table, layer)


def layer_body(
    layer: TowerLayer, heads: int, activation: Activation, special: LayerBody | None = None
) -> LayerBody:
    """What a layer of these weights computes."""
    size, bias = layer.hidden_size, layer.attention_bias
    output = bias if layer.output_bias is None else layer.output_bias
    width = layer.width or size
    head_dim = width // heads
    if not head_dim:
        msg = f"num_attention_heads: {heads} heads share hidden_size {width}: none has an element"
        raise ConfigError(msg)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=(layer.key_value_width or width) // head_dim,
        head_dim=head_dim, query_bias=bias,
        key_bias=bias if layer.key_bias is None else layer.key_bias, value_bias=bias,
        output_bias=output, causal=False, names_weights=False,
    )  # fmt: skip
    names = LayerNames(
        fused="qkv" if layer.fused else "", gate="gate_proj" if layer.gated else "",
        first_scale="layer_scale.lambda_1" if layer.layer_scales else "",
        second_scale="layer_scale.lambda_2" if layer.layer_scales else "",
    )  # fmt: skip
    base = special or LayerBody(
        size=size, inner_size=layer.intermediate_size, attention=attention, activation=activation
    )
    return replace(
        base, size=size, inner_size=layer.intermediate_size, attention=attention, names=names,
        activation=activation, norm=LAYER_NORM if layer.norm_bias else RMS_NORM, bias=layer.bias,
        head_norm=layer.head_norm_size,
    )  # fmt: skip
