"""T5's kin: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.spec import ModelSpec, Task, Tying
from memplan.sources.about_models.defaults import class_defaults

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SMALL = {"model_type": "t5", "num_layers": 2, "d_model": 64, "d_ff": 128, "vocab_size": 1000}


def read(config: Mapping[str, object], task: Task | None = None) -> ModelSpec:
    return read_model(config, source="config.json", name="x", defaults=class_defaults(), task=task)


def feed_forward(config: Mapping[str, object]) -> FeedForwardSpec:
    found = read(config).stacks[0].runs[0].layer.feed_forward
    assert isinstance(found, FeedForwardSpec)
    return found


# Sizes from the models' configs; counts from transformers 5.23 (tied, and with a matrix apart).
@pytest.mark.parametrize(
    ("model_type", "sizes", "total", "largest", "untied"),
    [
        pytest.param("t5", {}, 60_506_624, 16_449_536, 76_956_160, id="t5-small"),
        pytest.param(
            "t5",
            {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
            222_903_552, 24_674_304, 247_577_856, id="t5-base",
        ),
        pytest.param(
            "t5",
            {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_layers": 24, "num_heads": 32},
            2_851_598_336, 32_899_072, 2_884_497_408, id="t5-3b",
        ),
        pytest.param(
            "t5",
            {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, **GATED},
            750_251_008, 32_899_072, 783_150_080, id="flan-t5-large",
        ),
        pytest.param(
            "t5",
            {"d_model": 1472, "d_ff": 3584, "num_layers": 12, "num_decoder_layers": 4,
             "num_heads": 6, "vocab_size": 384, **GATED},
            299_072_512, 5_275_648, 299_637_760, id="byt5-small",
        ),
        pytest.param(
            "mt5",
            {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, **GATED},
            973_466_624, 256_114_688, 1_229_581_312, id="mt5-large",
        ),
        pytest.param(
            "umt5",
            {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32,
             "vocab_size": 256_384, **GATED},
            3_243_282_432, 525_074_432, 3_768_356_864, id="umt5-xl",
        ),
    ],
)  # fmt: skip
def test_counts(
    model_type: str, sizes: dict[str, object], total: int, largest: int, untied: int
) -> None:
    counts = count_parameters(read({"model_type": model_type, **sizes}))
    assert (counts.total, counts.base, counts.largest_layer, counts.untied) == (
        total, total, largest, untied,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("file_says", "tying", "scaled"),
    [({}, Tying.CLEAR, True), ({"tie_word_embeddings": True}, Tying.CLEAR, True),
     ({"tie_word_embeddings": False}, Tying.AMBIGUOUS, False)],
    ids=["silent", "tied", "untied"],
)  # fmt: skip
def test_untied_file_is_tied_but_ambiguous(
    file_says: dict[str, object], tying: Tying, scaled: bool
) -> None:
    model = read({**SMALL, **file_says})
    assert model.head.tied
    assert (model.tying, model.head.scaled) == (tying, scaled)


@pytest.mark.parametrize(("model_type", "scaled"), [("t5", False), ("mt5", False), ("umt5", True)])
def test_scaling_of_the_output_is_the_classes_own(model_type: str, scaled: bool) -> None:
    model = read({**SMALL, "model_type": model_type, "tie_word_embeddings": False})
    assert model.head.scaled is scaled


@pytest.mark.parametrize(
    ("keys", "activation", "gated"),
    [
        pytest.param({}, Activation.RELU, False, id="default"),
        pytest.param({"feed_forward_proj": "gated-gelu"}, Activation.GELU_NEW, True, id="gelu-new"),
        pytest.param({"feed_forward_proj": "gelu"}, Activation.GELU, False, id="plain-gelu"),
        pytest.param({"feed_forward_proj": "gated-silu"}, Activation.SILU, True, id="silu"),
        pytest.param(
            {"dense_act_fn": "gelu_new", "is_gated_act": True}, Activation.GELU_NEW, True,
            id="the-derived-keys-win",
        ),
    ],
)  # fmt: skip
def test_feed_forward(keys: dict[str, object], activation: Activation, gated: bool) -> None:
    found = feed_forward({**SMALL, **keys})
    assert (found.activation, found.gated) == (activation, gated)


def test_the_decoder_is_as_deep_as_the_encoder_by_default() -> None:
    assert [stack.num_layers for stack in read(SMALL).stacks] == [2, 2]
    assert [stack.num_layers for stack in read({**SMALL, "num_decoder_layers": 5}).stacks] == [2, 5]


def test_heads_need_not_divide_the_hidden_size() -> None:
    assert count_parameters(read({**SMALL, "num_heads": 7, "d_kv": 24})).total > 0


@pytest.mark.parametrize(
    ("model_type", "total"), [("t5", 921_538), ("mt5", 757_570), ("umt5", 757_954)]
)
def test_sequence_classification(model_type: str, total: int) -> None:
    model = read({**SMALL, "model_type": model_type}, task=Task.SEQUENCE_CLASSIFICATION)
    assert count_parameters(model).total == total


def test_the_old_name_of_the_class() -> None:
    model = read({**SMALL, "architectures": ["T5WithLMHeadModel"]})
    assert model.task is Task.SEQ2SEQ_LM


def test_a_decoder_alone_is_asked_for_in_vain() -> None:
    """Only the old name's task is another one's word."""
    with pytest.raises(ConfigError, match="causal-lm"):
        read(SMALL, task=Task.CAUSAL_LM)


def test_a_missing_model_type_is_told_by_the_architecture() -> None:
    config = {**SMALL, "architectures": ["UMT5ForConditionalGeneration"]}
    del config["model_type"]
    assert read(config).family == "umt5"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"architectures": ["T5EncoderModel"]}, "architectures"),
        ({"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj"),
        ({"feed_forward_proj": "maxout"}, "feed_forward_proj"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_refused(keys: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}"):
        read({**SMALL, **keys})


def test_an_encoder_alone_can_be_read_as_the_whole_model() -> None:
    config = {**SMALL, "architectures": ["T5EncoderModel"]}
    assert read(config, task=Task.SEQ2SEQ_LM).task is Task.SEQ2SEQ_LM
