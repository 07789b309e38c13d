"""What the config classes fill in, and which keys a config of each type may hold."""

from typing import Any

import pytest

from memplan.sources.about_models.defaults import class_defaults, known_keys


def test_a_mapping_of_all_types() -> None:
    defaults = class_defaults()
    assert len(defaults) == len(set(defaults)) > 250
    assert "t5" in defaults
    assert "no-such-type" not in defaults
    assert defaults.get("no-such-type") is None
    with pytest.raises(KeyError, match="no-such-type"):
        defaults["no-such-type"]
    assert defaults["t5"] is defaults["t5"]


def test_rows_are_well_formed() -> None:
    for model_type in class_defaults():
        row: Any = class_defaults()[model_type]
        assert row.keys() <= {"class", "defaults", "optional", "parts", "renamed"}, model_type
        assert not set(row.get("optional", ())) & row["defaults"].keys(), model_type


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("llama", "head_dim"),
        ("gpt2", "n_inner"),
        ("gemma3", "text_config"),
        ("starcoder2", "sliding_window"),
        ("deepseek_v2", "num_experts_per_tok"),
        ("olmo", "clip_qkv"),
        ("bert", "classifier_dropout"),
        ("nemotron_h", "hybrid_override_pattern"),
        ("qwen2_vl", "hidden_size"),
    ],
)
def test_known_keys(model_type: str, key: str) -> None:
    assert key in known_keys(model_type)
    assert f"{key}s" not in known_keys(model_type)


def test_a_type_without_defaults_has_no_known_keys() -> None:
    assert known_keys("no-such-type") == frozenset()
