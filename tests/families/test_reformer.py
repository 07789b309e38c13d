"""Reformer: two kinds of attention, two kinds of positions, outputs twice as wide."""

import pytest

from memplan.errors import ConfigError
from memplan.model.spec import Task
from tests.families.reading import counted, read

PLAIN = {
    "model_type": "reformer", "hidden_size": 64, "num_attention_heads": 4,
    "attention_head_size": 8, "feed_forward_size": 128, "vocab_size": 1000,
    "attn_layers": ["lsh", "lsh"], "axial_pos_embds": False, "max_position_embeddings": 128,
}  # fmt: skip
AXIAL = {
    **PLAIN, "attn_layers": ["local", "lsh", "lsh"], "axial_pos_embds": True,
    "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48],
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "task", "total", "largest"),
    [
        (AXIAL, Task.BASE, 136_128, 64_000),
        (AXIAL, Task.CAUSAL_LM, 265_128, 128_000),
        (AXIAL, Task.SEQUENCE_CLASSIFICATION, 144_514, 64_000),
        (AXIAL, Task.QUESTION_ANSWERING, 136_386, 64_000),
        (PLAIN, Task.BASE, 118_400, 64_000),
        (PLAIN, Task.CAUSAL_LM, 247_400, 128_000),
    ],
)
def test_counts(config: dict[str, object], task: Task, total: int, largest: int) -> None:
    assert counted(config, task) == (total, largest)


def test_a_bare_model_is_trained_on_text() -> None:
    assert read(PLAIN).task is Task.CAUSAL_LM


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axial_pos_embds_dim": [16, 16]}, "sum to the hidden_size"),
        ({"attn_layers": ["dense"]}, "attn_layers: 'dense' is not known"),
    ],
)
def test_impossible_shapes(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**AXIAL, **changed})
