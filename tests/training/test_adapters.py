"""Adapters as data: what they take, and what they refuse."""

from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.training.adapters import AdapterDtype, Lora, read_adapter


def test_kinds_and_fields() -> None:
    lora = read_adapter({"lora": {"rank": 16, "targets": ["q_proj"], "dtype": "bf16"}})
    assert lora == Lora(rank=16, targets=("q_proj",), dtype=AdapterDtype.BF16)
    assert str(lora) == "LoRA rank 16 on q_proj; bf16"
    assert read_adapter({"lora": 16}) == Lora(rank=16)
    assert read_adapter("none") is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lorra": 16}, "Did you mean 'lora'?"),
        ({"lora": {"rnk": 16}}, "Did you mean 'rank'?"),
        ({"lora": {"rank": 0}}, "must be a whole number from 1"),
        ({"lora": {"dropout": 1.5}}, "must be from 0 to below 1"),
        ({"lora": {"dtype": "bf61"}}, "Did you mean 'bf16'?"),
        ({"lora": {"bias": "some"}}, "is not one of none, all, lora_only"),
        ({"lora": {"targets": [1]}}, "expected names of modules"),
        ({"lora": 4, "ia3": {}}, "expected one kind"),
        (16, "expected one kind"),
    ],
)
def test_what_is_wrong_is_refused(value: Any, words: str) -> None:
    with pytest.raises(SetupError, match="adapter: ") as caught:
        read_adapter(value)
    assert words in str(caught.value)
