"""LongT5 and Switch Transformers: counts, and where the experts stand."""

import pytest

from memplan.graph.counts import count_parameters
from memplan.model.spec import Task, Tying
from tests.families.reading import counted, read

SMALL = {
    "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 4, "num_decoder_layers": 6,
    "num_heads": 4, "vocab_size": 1000,
}  # fmt: skip
SWITCH = {"model_type": "switch_transformers", **SMALL, "num_experts": 4}


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        pytest.param({"model_type": "longt5", **SMALL}, 360_960, id="longt5-local"),
        pytest.param(
            {"model_type": "longt5", **SMALL, "encoder_attention_type": "transient-global",
             "feed_forward_proj": "gated-gelu"},
            443_264, id="longt5-tglobal",
        ),
        pytest.param(
            {**SWITCH, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3},
            608_000, id="switch",
        ),
        pytest.param(
            {**SWITCH, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 6,
             "router_bias": True},
            706_844, id="switch-none-means-one",
        ),
        pytest.param(
            {**SWITCH, "encoder_sparse_step": 1, "decoder_sparse_step": 0},
            558_592, id="switch-steps-in-the-file-win",
        ),
    ],
)  # fmt: skip
def test_counts(config: dict[str, object], total: int) -> None:
    assert counted(config) == (total, 64_000)
    assert counted(config, Task.BASE) == (total, 64_000)


def test_published_counts() -> None:
    """Of google/switch-base-8: a token passes one expert of eight."""
    counts = count_parameters(
        read(
            {"model_type": "switch_transformers", "d_ff": 3072, "num_sparse_encoder_layers": 6,
             "num_sparse_decoder_layers": 6, "num_experts": 8}
        )
    )  # fmt: skip
    assert (counts.total, counts.active) == (619_339_008, 222_977_280)
    assert (counts.largest_layer, counts.untied) == (24_674_304, 644_013_312)


def test_longt5_is_tied_whatever_the_file_says() -> None:
    model = read({"model_type": "longt5", **SMALL, "tie_word_embeddings": False})
    assert model.tying is Tying.AMBIGUOUS
    assert count_parameters(model).total == 360_960
    assert count_parameters(model).untied == 424_960


def test_untied_stacks_have_a_table_each() -> None:
    steps = {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3}
    untied = {**SWITCH, **steps, "tie_word_embeddings": False}
    assert counted(untied) == (608_000 + 3 * 64_000, 64_000)
    assert counted(untied, Task.BASE) == (608_000 + 2 * 64_000, 64_000)


def test_all_activations_are_there() -> None:
    assert not read({"model_type": "longt5", **SMALL}).activations_left_out
    assert not read({**SWITCH, "num_sparse_encoder_layers": 2}).activations_left_out
