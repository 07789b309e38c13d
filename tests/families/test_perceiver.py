"""Perceiver on text: the base model has neither table nor decoder."""

import pytest

from memplan.api import estimate
from memplan.errors import SetupError
from memplan.model.spec import Task
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.families.reading import counted

SMALL = {
    "model_type": "perceiver", "num_latents": 16, "d_latents": 64, "d_model": 48,
    "num_self_attends_per_block": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
NARROW = {**SMALL, "qk_channels": 32, "v_channels": 64}
WIDE = {
    **SMALL, "cross_attention_widening_factor": 2, "self_attention_widening_factor": 3,
    "cross_attention_shape_for_attention": "q",
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "task", "total", "largest"),
    [
        pytest.param(NARROW, Task.BASE, 62_752, 4_160, id="narrow-base"),
        pytest.param(NARROW, Task.MASKED_LM, 113_476, 16_640, id="narrow"),
        pytest.param(WIDE, Task.BASE, 116_000, 12_480, id="wide-base"),
        pytest.param(WIDE, Task.MASKED_LM, 166_724, 16_640, id="wide"),
    ],
)
def test_counts(config: dict[str, object], task: Task, total: int, largest: int) -> None:
    assert counted(config, task) == (total, largest)


def test_blocks_run_again_with_the_same_weights() -> None:
    assert counted({**NARROW, "num_blocks": 8}) == counted(NARROW)


def test_only_what_spells_is_written_down_and_of_one_length() -> None:
    model = load_model({"model_type": "perceiver", "architectures": ["PerceiverForMaskedLM"]})
    assert not model.activations_left_out
    assert load_model({"model_type": "perceiver"}, Task.BASE).activations_left_out
    assert load_model({"model_type": "perceiver", "num_blocks": 2}).activations_left_out
    with pytest.raises(SetupError, match="spells 2048 tokens"):
        estimate(model, TrainingSetup(seq_len=512))


def test_a_weight_that_is_spread_over_samples_is_no_activation() -> None:
    model = load_model({**NARROW, "architectures": ["PerceiverForMaskedLM"]})
    setup = TrainingSetup(num_gpus=2, engine="deepspeed", zero_stage=2)
    for phase in estimate(model, setup).phases.values():
        assert min(phase.components.values()) >= 0
