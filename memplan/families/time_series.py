"""Models of time series: PatchTST, a transformer over patches, and PatchTSMixer without attention."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import attention
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.parts import LinearBody
from memplan.model.towers.series import (
    ForecastBody,
    SeriesBody,
    SeriesLayerBody,
    SeriesMixerBody,
    SeriesPooling,
    SeriesPositionsBody,
)

PREDICTION = "ForPrediction"
PRETRAINING = "ForPretraining"
REGRESSION = "ForRegression"
CLASSES = "ForClassification"
SERIES_CLASSES = "ForTimeSeriesClassification"
PARAMETERS_OF = {"student_t": 3, "normal": 2, "negative_binomial": 2}
"""Numbers that each distribution needs (``transformers.time_series_utils``)."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def num_patches(reader: ConfigReader) -> int:
    """Patches of a series."""
    length = reader.integer("patch_length")
    return (max(reader.integer("context_length"), length) - length) // reader.integer(
        "patch_stride"
    ) + 1


def _forecast(
    table: ParameterTable, name: str, reader: ConfigReader, features: int, out: int
) -> None:
    """A linear layer to the values, or one for each parameter of their distribution.

    The mean of squares is the loss where the config names none.
    """
    if reader.text("loss", default="mse") == "mse":
        table.linear(name, features, out)
        return
    kind = reader.text("distribution_output", default="student_t")
    reader.choice("distribution_output", kind, PARAMETERS_OF)
    for index in range(PARAMETERS_OF[kind]):
        table.linear(f"{name}.{index}", features, out)


def _patchtst(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = reader.integer("d_model")
    pooled = bool(reader.text("pooling_type")) or reader.flag("use_cls_token")

    def declare(table: ParameterTable, ending: str) -> None:
        _patchtst_encoder(table, reader, size)
        channels = reader.integer("num_input_channels")
        shared = reader.flag("share_projection", default=True)
        apart = ending == PREDICTION and not shared
        forecast = None
        if ending == PREDICTION and not apart and not _named_loss(reader):
            forecast = ForecastBody(
                module="projection", features=size if pooled else size * num_patches(reader),
                steps=reader.integer("prediction_length"), channels=channels, size=size,
                pooling=_pooling(reader), dropout=reader.number("head_dropout", default=0.0),
            )  # fmt: skip
        with table.block("head", count=channels if apart else 1, body=forecast):
            match ending:
                case "ForPrediction":
                    features = size if pooled else size * num_patches(reader)
                    out = reader.integer("prediction_length")
                    _forecast(table, "projection", reader, features, out)
                case "ForPretraining":
                    table.linear("linear", size, reader.integer("patch_length"))
                case "ForClassification":
                    table.linear("linear", channels * size, reader.integer("num_targets"))
                case "ForRegression":
                    targets = reader.integer("num_targets")
                    _forecast(table, "projection", reader, channels * size, targets)
                case _:
                    pass

    model = whole_model(
        reader, request, (PREDICTION, BARE, PRETRAINING, CLASSES, REGRESSION), declare,
        hidden_size=size, context_length=num_patches(reader),
    )  # fmt: skip
    return replace(model, recomputes=False)


def _named_loss(reader: ConfigReader) -> bool:
    """Whether the loss is a distribution's, which is counted."""
    return reader.text("loss", default="mse") != "mse"


def _pooling(reader: ConfigReader) -> SeriesPooling:
    if reader.flag("use_cls_token"):
        return SeriesPooling.FIRST
    known = {each.value: each for each in (SeriesPooling.MEAN, SeriesPooling.GREATEST)}
    name = reader.text("pooling_type")
    return known[reader.choice("pooling_type", name, known)] if name else SeriesPooling.ALL


def _series(reader: ConfigReader, channels: int) -> SeriesBody:
    return SeriesBody(
        channels=channels, length=reader.integer("context_length"),
        patch=reader.integer("patch_length"), num_patches=num_patches(reader),
        scaled=reader.raw("scaling") in ("std", "mean", True),
    )  # fmt: skip


def _positions(table: ParameterTable, reader: ConfigReader, rows: int, size: int) -> None:
    """Sinusoids are a parameter that is not trained."""
    if reader.text("positional_encoding_type", default="sincos") == "sincos":
        table.untrained("positional_encoder", "position_enc", rows, size)
    else:
        table.parameter("positional_encoder", "position_enc", rows, size)


def _patchtst_encoder(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """``PatchTSTEncoder``."""
    token = reader.flag("use_cls_token")
    shared = reader.flag("share_embedding", default=True)
    channels, patch = reader.integer("num_input_channels"), reader.integer("patch_length")
    # Series with matrices of their own are counted.
    embedded = ChainBody(
        parts=(
            _series(reader, channels),
            LinearBody(module="input_embedding", inputs=patch, outputs=size),
        )
    )
    with table.block("embed", count=1 if shared else channels, body=embedded if shared else None):
        table.linear("input_embedding", patch, size)
    drop = reader.number("positional_dropout", default=0.0)
    placed = SeriesPositionsBody(size=size, token=token, dropout=drop, kept=True)
    with table.block("positions", body=placed):
        if token:
            table.parameter("positional_encoder", "cls_token", 1, 1, 1, size)
        positions = num_patches(reader) + token
        _positions(table, reader, positions, size)
    bias, heads = reader.flag("bias", default=True), reader.integer("num_attention_heads")
    reader.divide("d_model", size, "num_attention_heads", heads)
    kind = reader.text("norm_type", default="batchnorm")
    body = SeriesLayerBody(
        size=size, inner_size=reader.integer("ffn_dim"), num_heads=heads, channels=channels,
        tokens=positions, activation=tower_activation(reader, "activation_function"),
        batch_norm=reader.choice("norm_type", kind, ("batchnorm", "layernorm")) == "batchnorm",
        norms_first=reader.flag("pre_norm", default=True),
        across_channels=reader.flag("channel_attention"), bias=bias,
        attention_dropout=reader.number("attention_dropout", default=0.0),
        dropout=reader.number("ff_dropout", default=0.0),
        path_dropout=reader.number("path_dropout", default=0.0),
    )  # fmt: skip
    with table.block("layers", count=reader.layers("num_hidden_layers"), body=body):
        attention(table, "self_attn", size)
        table.norm("norm_sublayer1", size)
        if reader.flag("channel_attention"):
            table.norm("norm_sublayer2", size)
        perceptron(table, "ff", size, reader.integer("ffn_dim"), bias=bias)
        table.norm("norm_sublayer3", size)


def _patchtsmixer(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size, patches = reader.integer("d_model"), num_patches(reader)

    def declare(table: ParameterTable, ending: str) -> None:
        _mixer_encoder(table, reader, size, patches)
        if ending in {REGRESSION, SERIES_CLASSES}:
            _scale_injection(table, reader, size)
        forecast = None
        if ending == PREDICTION and not _named_loss(reader):
            forecast = ForecastBody(
                module="base_forecast_block", features=patches * size, size=size,
                steps=reader.integer("prediction_length"),
                channels=reader.integer("num_input_channels"), pooling=SeriesPooling.ALL,
                dropout=reader.number("head_dropout", default=0.0),
            )  # fmt: skip
        if reader.raw("prediction_channel_indices") is not None:
            forecast = None
        with table.block("head", body=forecast):
            _mixer_head(table, reader, ending, size, patches)

    model = whole_model(
        reader, request, (PREDICTION, BARE, PRETRAINING, REGRESSION, SERIES_CLASSES), declare,
        hidden_size=size, context_length=patches,
    )  # fmt: skip
    return replace(model, recomputes=False, eager_attention_only=True)


def _mixer_encoder(table: ParameterTable, reader: ConfigReader, size: int, patches: int) -> None:
    """Each layer mixes patches, then features; some also channels."""
    channels, patch = reader.integer("num_input_channels"), reader.integer("patch_length")
    placed = reader.flag("use_positional_encoding")
    parts: tuple[TowerBody, ...] = (
        _series(reader, channels), LinearBody(module="patcher", inputs=patch, outputs=size),
    )  # fmt: skip
    if placed:
        parts += (SeriesPositionsBody(size=size),)
    with table.block("embed", body=ChainBody(parts=parts)):
        table.linear("patcher", patch, size)
        if placed:
            _positions(table, reader, patches, size)
    across = reader.text("mode") == "mix_channel"
    body = SeriesMixerBody(
        size=size, channels=channels, patches=patches,
        widening=reader.integer("expansion_factor"),
        batch_norm="batch" in reader.text("norm_mlp", default="LayerNorm").lower(),
        gated=reader.flag("gated_attn", default=True), across_channels=across,
        num_heads=reader.integer("self_attn_heads", default=1) if reader.flag("self_attn") else 0,
        dropout=reader.number("dropout", default=0.0),
    )  # fmt: skip
    with table.block("layers", count=reader.layers("num_layers"), body=body):
        if across:
            _mix(table, "channel_feature_mixer", reader, size, channels)
        _mix(table, "patch_mixer", reader, size, patches)
        if reader.flag("self_attn"):
            attention(table, "patch_mixer.self_attn_layer", size)
            table.norm("patch_mixer.norm_attn", size)
        _mix(table, "feature_mixer", reader, size, size)


def _mix(table: ParameterTable, name: str, reader: ConfigReader, size: int, mixed: int) -> None:
    table.norm(f"{name}.norm", size)
    perceptron(table, f"{name}.mlp", mixed, mixed * reader.integer("expansion_factor"))
    if reader.flag("gated_attn", default=True):
        table.linear(f"{name}.gating_block", mixed, mixed)


def _scale_injection(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """``InjectScalerStatistics4D``: mean and scale beside the features, twice as wide inside."""
    scaling = reader.raw("scaling")
    if scaling not in ("std", "mean", True):
        return
    with table.block("inject_scale"):
        table.linear("inverse_trans_expansion", size + 2, 2 * size)
        table.linear("inverse_trans_compression", 2 * size, size)
        table.linear("map_scale_expansion", 2, 4)
        table.linear("map_scale_compression", 4, 2)


def _mixer_head(
    table: ParameterTable, reader: ConfigReader, ending: str, size: int, patches: int
) -> None:
    match ending:
        case "ForPrediction":
            out = reader.integer("prediction_length")
            _forecast(table, "base_forecast_block", reader, patches * size, out)
        case "ForPretraining":
            table.linear("base_pt_block", size, reader.integer("patch_length"))
        case "ForRegression" | "ForTimeSeriesClassification":
            seen = 1 if reader.text("head_aggregation") else patches
            features = size * reader.integer("num_input_channels") * seen
            targets = reader.integer("num_targets")
            if ending == REGRESSION:
                _forecast(table, "projection", reader, features, targets)
            else:
                table.linear("projection", features, targets)
        case _:
            pass


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "patchtst": _patchtst,
    "patchtsmixer": _patchtsmixer,
}
