"""wav2vec2-bert: a Conformer over filter banks, an adapter with attention (``Wav2Vec2BertModel``)."""

from memplan.families.towers.layers import perceptron, tower_activation
from memplan.families.towers.sounds.conformer import (
    conformer_layer,
    declare_adapter,
    declare_conformer,
)
from memplan.families.towers.sounds.wav2vec2 import (
    adapter_projection,
    masks,
    output_size,
    time_mask,
)
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.conformer import (
    AttentiveAdapterBody,
    Distances,
    DistanceTablesBody,
    HalfNetworkBody,
)
from memplan.model.towers.parts import LinearBody, NormBody
from memplan.model.towers.sounds import FeaturesBody, ProjectedFramesBody

FRAMES_A_SECOND = 50
"""Filter banks every 10 milliseconds, two of which lie in a row (``SeamlessM4TFeatureExtractor``)."""
SECONDS = 30
"""How long clips are cut where the setup says nothing else."""


def wav2vec2_bert_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """The bare model."""
    size = reader.integer("hidden_size")
    features = reader.integer("feature_projection_input_dim")
    given = FeaturesBody(
        features=features, length=SECONDS * FRAMES_A_SECOND, rate=FRAMES_A_SECOND
    )  # fmt: skip
    projected = ProjectedFramesBody(
        features=features, size=size, norm="layer_norm",
        dropout=reader.number("feat_proj_dropout", default=0.0), mask=time_mask(reader),
        returned=True,
    )  # fmt: skip
    body = conformer_layer(
        reader, (Distances.SINES, Distances.TABLE, Distances.ROTARY), causal=True
    )  # fmt: skip
    tables = DistanceTablesBody(
        size=size, head_dim=size // body.num_heads, distances=body.distances,
        positions=reader.integer("max_source_positions"), dropout=body.dropout,
    )  # fmt: skip
    chain = ChainBody(parts=(given, projected, tables))
    with table.block(f"{name}.feature_projection", body=chain):
        table.norm("layer_norm", features)
        table.linear("projection", features, size)
        if masks(reader):
            table.parameter("model", "masked_spec_embed", size)
    count = reader.layers("num_hidden_layers")
    declare_conformer(table, f"{name}.encoder.layers", count, reader, body)
    if reader.flag("use_intermediate_ffn_before_adapter"):
        half = HalfNetworkBody(
            module="intermediate_ffn", size=size, inner_size=body.inner_size,
            activation=Activation.RELU, dropout=body.dropout,
            activation_dropout=body.activation_dropout,
        )  # fmt: skip
        with table.block(f"{name}.intermediate", body=half):
            perceptron(table, "intermediate_ffn", size, body.inner_size)
    if reader.flag("add_adapter"):
        _adapter(table, name, reader)


def _adapter(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    size, out = reader.integer("hidden_size"), output_size(reader)
    if out != size:
        narrow = LinearBody(module="adapter.proj", inputs=size, outputs=out)
        norm = NormBody(module="adapter.proj_layer_norm", size=out)
        with table.block(f"{name}.adapter", body=ChainBody(parts=(narrow, norm))):
            adapter_projection(table, reader)
    heads = reader.integer("num_attention_heads")
    reader.divide("output_hidden_size", out, "num_attention_heads", heads)
    body = AttentiveAdapterBody(
        size=out, inner_size=reader.integer("intermediate_size"), num_heads=heads,
        kernel=reader.integer("adapter_kernel_size"), stride=reader.integer("adapter_stride"),
        activation=tower_activation(reader, "adapter_act"),
        dropout=reader.number("hidden_dropout", default=0.0),
        activation_dropout=reader.number("activation_dropout", default=0.0),
        attention_dropout=reader.number("attention_dropout", default=0.0),
        result_dropout=reader.number("conformer_conv_dropout", default=0.0),
    )  # fmt: skip
    declare_adapter(table, f"{name}.adapter.layers", reader.layers("num_adapter_layers"), body)
