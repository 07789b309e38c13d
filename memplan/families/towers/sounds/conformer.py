"""Conformers: wav2vec 2.0's, wav2vec2-bert's and Seamless M4T's speech encoders."""

from memplan.families.towers.layers import perceptron, tower_activation
from memplan.families.towers.parts import attention
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.conformer import AttentiveAdapterBody, ConformerLayerBody, Distances


def distances_of(reader: ConfigReader, known: tuple[Distances, ...]) -> Distances:
    """How attention knows where its tokens are; the classes take any other name for none."""
    name = reader.text("position_embeddings_type", default="")
    return next((each for each in known if each.value == name), Distances.NONE)


def conformer_layer(
    reader: ConfigReader, known: tuple[Distances, ...], *, causal: bool = False
) -> ConformerLayerBody:
    """A layer of wav2vec 2.0's kin, of the ``known`` ways to tell positions apart."""
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    reader.divide("hidden_size", size, "num_attention_heads", heads)
    return ConformerLayerBody(
        size=size, inner_size=reader.integer("intermediate_size"), num_heads=heads,
        activation=tower_activation(reader, "hidden_act"), distances=distances_of(reader, known),
        kernel=reader.integer("conv_depthwise_kernel_size"), causal=causal,
        dropout=reader.number("hidden_dropout", default=0.0),
        activation_dropout=reader.number("activation_dropout", default=0.0),
        attention_dropout=reader.number("attention_dropout", default=0.0),
        convolution_dropout=reader.number("conformer_conv_dropout", default=0.0),
    )  # fmt: skip


def declare_conformer(
    table: ParameterTable, name: str, count: int, reader: ConfigReader, body: ConformerLayerBody
) -> None:
    """Half a feed-forward network, attention, convolutions, and the other half.

    The convolutions' norm is of the batch or of each layer: both own a weight and a bias.
    """
    size, kernel = body.size, body.kernel
    with table.block(name, count=count, body=body):
        for half in ("ffn1", "ffn2"):
            table.norm(f"{half}_layer_norm", size)
            perceptron(table, half, size, body.inner_size)
        table.norm("self_attn_layer_norm", size)
        attention(table, "self_attn", size)
        _distances(table, reader, body)
        table.norm("conv_module.layer_norm", size)
        table.convolution("conv_module.pointwise_conv1", size, 2 * size, 1, bias=False)
        table.convolution("conv_module.depthwise_conv", size, size, kernel, groups=size, bias=False)
        table.norm(f"conv_module.{'depthwise_layer_norm' if body.causal else 'batch_norm'}", size)
        table.convolution("conv_module.pointwise_conv2", size, size, 1, bias=False)
        table.norm("final_layer_norm", size)


def _distances(table: ParameterTable, reader: ConfigReader, body: ConformerLayerBody) -> None:
    size, heads = body.size, body.num_heads
    if body.distances is Distances.SINES:
        table.linear("self_attn.linear_pos", size, size, bias=False)
        table.parameter("self_attn", "pos_bias_u", heads, size // heads)
        table.parameter("self_attn", "pos_bias_v", heads, size // heads)
    if body.distances is Distances.TABLE:
        left = reader.integer("left_max_position_embeddings", minimum=0)
        right = reader.integer("right_max_position_embeddings", minimum=0)
        table.embedding("self_attn.distance_embedding", left + right + 1, size // heads)


def declare_adapter(
    table: ParameterTable, name: str, count: int, body: AttentiveAdapterBody
) -> None:
    """Layers that make frames fewer, twice in each, and attend."""
    size = body.size
    with table.block(name, count=count, body=body):
        for each in ("residual", "self_attn"):
            table.norm(f"{each}_layer_norm", size)
            table.convolution(f"{each}_conv", size, 2 * size, body.kernel)
        attention(table, "self_attn", size)
        table.norm("ffn_layer_norm", size)
        perceptron(table, "ffn", size, body.inner_size)
