"""Encoders of speech with the heads that are trained on them: wav2vec 2.0 and its kin."""

from memplan.families.classes import BARE, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.families.towers.sounds.wav2vec2 import (
    WAV2VEC2_KINDS,
    output_size,
    wav2vec2_tower,
    weighs_layers,
)
from memplan.families.towers.sounds.wav2vec2_bert import wav2vec2_bert_tower
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.sounds import TranscriptBody
from memplan.model.towers.speech import FrameClassesBody

CTC = "ForCTC"
SEQUENCES = "ForSequenceClassification"
FRAMES = "ForAudioFrameClassification"
SPEAKERS = "ForXVector"
PRETRAINING = "ForPreTraining"
WITH_PRETRAINING = frozenset({"wav2vec2", "wav2vec2-conformer"})
"""Types whose class for pretraining is written down here."""
POSITIONS = 1500
"""What the layers see of 30 seconds at 50 vectors a second, which is how long clips are cut."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of ``WAV2VEC2_KINDS``, or wav2vec2-bert's."""
    heads = [CTC, BARE, SEQUENCES]
    if request.model_type not in _WITHOUT_FRAMES:
        heads += [FRAMES, SPEAKERS]
    if request.model_type in WITH_PRETRAINING:
        heads.append(PRETRAINING)

    def declare(table: ParameterTable, ending: str) -> None:
        if request.model_type == "wav2vec2-bert":
            wav2vec2_bert_tower(table, "model", reader)
        else:
            wav2vec2_tower(table, "model", reader, WAV2VEC2_KINDS[request.model_type])
        _head(table, reader, request, ending)

    return whole_model(
        reader, request, tuple(heads), declare,
        hidden_size=reader.integer("hidden_size"), context_length=POSITIONS,
    )  # fmt: skip


_WITHOUT_FRAMES = frozenset({"hubert", "unispeech"})
"""Types that have no class for frames and speakers."""


def _head(table: ParameterTable, reader: ConfigReader, request: ReadRequest, ending: str) -> None:
    size = reader.integer("hidden_size")
    body: TranscriptBody | FrameClassesBody | None = None
    if ending == FRAMES and not reader.flag("add_adapter"):
        # With one class its loss would be another.
        body = FrameClassesBody(
            module="classifier", size=size, classes=request.labels(reader),
            weights="model.layer_weights" if weighs_layers(reader) else "",
        )  # fmt: skip
    bert = request.model_type == "wav2vec2-bert"
    adapted = reader.flag("add_adapter")
    if ending == CTC and (bert or not adapted):
        body = TranscriptBody(
            size=output_size(reader) if adapted else size, rows=reader.integer("vocab_size"),
            dropout=reader.number("final_dropout", default=0.0),
        )  # fmt: skip
    with table.block("head", body=body):
        if ending in {SEQUENCES, FRAMES, SPEAKERS} and reader.flag("use_weighted_layer_sum"):
            table.parameter("model", "layer_weights", reader.layers("num_hidden_layers") + 1)
        match ending:
            case "ForCTC":
                width = output_size(reader) if reader.flag("add_adapter") else size
                table.linear("lm_head", width, reader.integer("vocab_size"))
            case "ForSequenceClassification":
                width = reader.integer("classifier_proj_size")
                table.linear("projector", size, width)
                table.linear("classifier", width, request.labels(reader))
            case "ForAudioFrameClassification":
                table.linear("classifier", size, request.labels(reader))
            case "ForXVector":
                _speaker_head(table, reader, request, size)
            case "ForPreTraining":
                _quantizer(table, reader, size)
            case _:
                pass


def _speaker_head(
    table: ParameterTable, reader: ConfigReader, request: ReadRequest, size: int
) -> None:
    """Time-delay layers, statistics over time (hence twice the width), and a vector a speaker."""
    widths = at_least_one(reader, "tdnn_dim")
    kernels = each_stage(reader, "tdnn_kernel", len(widths))
    table.linear("projector", size, widths[0])
    before = widths[0]
    for index, (width, kernel) in enumerate(zip(widths, kernels, strict=True)):
        table.linear(f"tdnn.{index}", before * kernel, width)
        before = width
    out = reader.integer("xvector_output_dim")
    table.linear("feature_extractor", 2 * before, out)
    table.linear("classifier", out, out)
    table.parameter("objective", "weight", out, request.labels(reader))


def _quantizer(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """``Wav2Vec2GumbelVectorQuantizer`` and two projections to the width where vectors meet."""
    groups = reader.integer("num_codevector_groups")
    count = groups * reader.integer("num_codevectors_per_group")
    width, met = reader.integer("codevector_dim"), reader.integer("proj_codevector_dim")
    features = at_least_one(reader, "conv_dim")[-1]
    narrow = reader.divide("codevector_dim", width, "num_codevector_groups", groups)
    table.parameter("quantizer", "codevectors", 1, count, narrow)
    table.linear("quantizer.weight_proj", features, count)
    table.linear("project_hid", size, met)
    table.linear("project_q", width, met)
