"""ModernBERT: counts, windows, and the first layer's missing norm.

Its activations are among ``tests/data/activations.jsonl``.
"""

import pytest

from memplan.errors import ConfigError
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.model.attention import AttentionSpec
from memplan.model.spec import Task
from tests.families.reading import counted, read

SMALL = {
    "model_type": "modernbert", "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 1000, "num_hidden_layers": 3,
}  # fmt: skip
BIASED = {
    **SMALL, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "classifier_bias": True, "decoder_bias": False, "global_attn_every_n_layers": 2,
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "task", "total", "largest"),
    [
        (SMALL, Task.BASE, 187_328, 64_000),
        (SMALL, Task.MASKED_LM, 192_488, 65_000),
        (SMALL, Task.SEQUENCE_CLASSIFICATION, 191_618, 64_000),
        (SMALL, Task.TOKEN_CLASSIFICATION, 191_618, 64_000),
        (SMALL, Task.QUESTION_ANSWERING, 191_618, 64_000),
        (SMALL, Task.MULTIPLE_CHOICE, 191_553, 64_000),
        (BIASED, Task.BASE, 189_504, 64_000),
        (BIASED, Task.MASKED_LM, 193_792, 64_000),
        (BIASED, Task.SEQUENCE_CLASSIFICATION, 193_922, 64_000),
        (BIASED, Task.MULTIPLE_CHOICE, 193_857, 64_000),
    ],
)
def test_counts(config: dict[str, object], task: Task, total: int, largest: int) -> None:
    assert counted(config, task) == (total, largest)


def test_published_counts() -> None:
    assert counted({"model_type": "modernbert"}) == (149_655_232, 38_732_992)


def test_a_choice_has_one_logit_whatever_the_labels() -> None:
    config = {**SMALL, "architectures": ["ModernBertForMultipleChoice"], "num_labels": 9}
    model = read(config)
    assert (model.task, model.num_labels) == (Task.MULTIPLE_CHOICE, 1)


def windows(config: dict[str, object]) -> list[int | None]:
    found = []
    for run in read(config).stacks[0].runs:
        assert isinstance(run.layer.attention, AttentionSpec)
        found += [run.layer.attention.sliding_window] * run.count
    return found


def test_every_third_layer_sees_everything() -> None:
    """``local_attention`` counts both sides."""
    config = {**SMALL, "num_hidden_layers": 5, "local_attention": 20}
    assert windows(config) == [None, 10, 10, None, 10]
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    assert windows({**SMALL, "layer_types": kinds}) == [None, None, 64]


def test_only_the_first_layer_has_no_norm_before_attention() -> None:
    tape = record_model(read({**SMALL, "num_hidden_layers": 7}), TapeOptions())
    layers = [each for each in tape.segments if each.is_layer for _ in range(each.repeat)]
    normed = [any(each.module == "attn_norm" for each in layer.parameters) for layer in layers]
    assert normed == [False] + [True] * 6


@pytest.mark.parametrize(("length", "made"), [(63, False), (64, True)])
def test_a_mask_only_where_the_window_cuts(length: int, made: bool) -> None:
    tape = record_model(read(SMALL), TapeOptions(seq_len=length))
    names = {operation.name for segment in tape.segments for operation in segment.operations}
    assert ("abs" in names) is made


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 3 layers"),
        ({"layer_types": ["full", "full", "full"]}, "layer_types: 'full' is not known"),
        ({"num_attention_heads": 5}, "not divisible"),
        ({"classifier_pooling": "max"}, "classifier_pooling: 'max' is not known"),
    ],
)
def test_impossible_shapes(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**SMALL, **changed})
