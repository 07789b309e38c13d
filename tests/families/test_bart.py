"""BART's kin: counts, and what sets the types apart."""

from collections.abc import Mapping

import pytest

from memplan.errors import ConfigError
from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters, trainable_parameters
from memplan.graph.model import record_model
from memplan.memory.replaying.ledger import Part
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

SMALL = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "vocab_size": 1000, "max_position_embeddings": 100,
}  # fmt: skip


def read(config: Mapping[str, object], task: Task | None = None) -> ModelSpec:
    return read_model(config, source="config.json", name="x", defaults=class_defaults(), task=task)


# Counts from transformers 5.23: tied; untied, each stack has a table beside the shared one.
@pytest.mark.parametrize(
    ("model_type", "tied", "apart"),
    [
        ("bart", 244_736, 436_736),
        ("plbart", 244_736, 436_736),
        ("mbart", 244_992, 436_992),
        ("pegasus", 244_480, 436_480),
        ("marian", 244_224, 436_224),
        ("blenderbot", 244_480, 436_480),
        ("blenderbot-small", 244_480, 436_480),
        ("m2m_100", 231_680, 423_680),
    ],
)
def test_counts(model_type: str, tied: int, apart: int) -> None:
    config = {"model_type": model_type, **SMALL}
    assert count_parameters(read(config)).total == tied
    assert count_parameters(read({**config, "tie_word_embeddings": False})).total == apart


@pytest.mark.parametrize(
    ("model_type", "sizes", "total", "largest", "untied"),
    [
        pytest.param("bart", {}, 406_291_456, 51_471_360, 457_762_816, id="bart-large"),
        pytest.param(
            "mbart", {"vocab_size": 250_054}, 610_879_488, 256_055_296, 866_934_784,
            id="mbart-large-50",
        ),
        pytest.param(
            "pegasus",
            {"vocab_size": 96_103, "encoder_layers": 16, "decoder_layers": 16,
             "activation_function": "relu"},
            570_797_056, 98_409_472, 669_206_528, id="pegasus-cnn_dailymail",
        ),
    ],
)  # fmt: skip
def test_real_models(
    model_type: str, sizes: dict[str, object], total: int, largest: int, untied: int
) -> None:
    counts = count_parameters(read({"model_type": model_type, **sizes}))
    assert (counts.total, counts.base, counts.largest_layer, counts.untied) == (
        total, total, largest, untied,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "fixed"), [("pegasus", 12_800), ("marian", 12_800), ("blenderbot", 0)]
)
def test_sinusoids_are_counted_but_not_trained(model_type: str, fixed: int) -> None:
    model = read({"model_type": model_type, **SMALL})
    trained = trainable_parameters(record_model(model, TapeOptions()))
    assert count_parameters(model).total - trained == fixed


@pytest.mark.parametrize(
    ("model_type", "total"), [("bart", 249_091), ("mbart", 249_282), ("plbart", 249_026)]
)
def test_sequence_classification_with_the_classes_own_number_of_labels(
    model_type: str, total: int
) -> None:
    model = read({"model_type": model_type, **SMALL}, task=Task.SEQUENCE_CLASSIFICATION)
    assert count_parameters(model).total == total


def test_number_of_labels_from_the_file() -> None:
    config = {"model_type": "bart", **SMALL, "num_labels": 5}
    assert read(config, task=Task.SEQUENCE_CLASSIFICATION).num_labels == 5


def test_a_type_without_a_classifier() -> None:
    with pytest.raises(ConfigError, match="pegasus has no task 'sequence-classification'"):
        read({"model_type": "pegasus", **SMALL}, task=Task.SEQUENCE_CLASSIFICATION)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
        ({"decoder_attention_heads": 5}, "d_model"),
        ({"activation_function": "maxout"}, "activation_function"),
    ],
)
def test_refused(keys: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}"):
        read({"model_type": "marian", **SMALL, **keys})


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_classes_of_sequences_read_their_source_twice(model_type: str) -> None:
    """Whatever length a target is given: there is none (``BartForSequenceClassification``)."""
    model = read({"model_type": model_type, **SMALL}, Task.SEQUENCE_CLASSIFICATION)
    tape = record_model(model, TapeOptions(seq_len=64, target_seq_len=16))
    assert tape.segments[-1].input.numel == 64 * 64  # type: ignore[union-attr]


def test_a_single_sequences_gradient_is_summed_for_positions_that_have_no_dimension_for_it() -> (
    None
):
    """``at::sum_to`` makes a tensor of the same size (Blenderbot's positions are looked up without a batch)."""
    config = {
        "model_type": "blenderbot-small", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    setup = TrainingSetup(micro_batch_size=1, seq_len=32, precision="fp32")  # type: ignore[arg-type]
    run = named_run(estimate(load_model(config, "seq2seq-lm"), setup, None))
    sums = [
        run.ledger.events[block]
        for block, label in sorted(run.labels.items())
        if (label.part, label.step, label.name) == (Part.BACKWARD, 0, "backward of add")
        and label.place.endswith("embed")
    ]
    assert sums == 2 * [4 * 32 * 64]


def test_parameters_by_what_people_call_them() -> None:
    """Four products with biases in every attention, two in every network, and norms behind each of them."""
    width, encoder, decoder = 64, 3, 2
    config = {
        "model_type": "bart", "d_model": width, "encoder_layers": encoder, "decoder_layers": decoder,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 96, "vocab_size": 1000, "max_position_embeddings": 100,
    }  # fmt: skip
    found = dict(count_parameters(load_model(config, "seq2seq-lm")).components)
    attention = 4 * (width * width + width)
    assert found["attention"] == (encoder + decoder) * attention
    assert found["cross-attention"] == decoder * attention
    assert found["norms"] == (2 * encoder + 3 * decoder) * 2 * width
    assert found["feed-forward"] == sum(
        layers * (2 * width * inner + inner + width)
        for layers, inner in ((encoder, 128), (decoder, 96))
    )
