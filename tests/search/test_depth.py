"""Models with another number of layers."""

import pytest

from memplan.errors import SetupError
from memplan.search.depth import pattern, with_layers
from memplan.sources.models import load_model

NAMES = ("t5-small", "gpt2", "bert-base-uncased", "llama-3.2-1b", "gemma-3-1b", "deepseek-v3")


@pytest.mark.parametrize("name", NAMES)
def test_as_many_layers_as_it_has_change_nothing(name: str) -> None:
    model = load_model(name)
    same = with_layers(model, model.stacks[0].num_layers)
    assert same.num_params == model.num_params
    assert [stack.num_layers for stack in same.stacks] == [
        stack.num_layers for stack in model.stacks
    ]


def test_more_layers_are_the_larger_config() -> None:
    config = {"model_type": "gemma3_text", "num_hidden_layers": 12, "head_dim": 64}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    small = load_model({**config, **sizes})
    large = load_model({**config, **sizes, "num_hidden_layers": 30})
    assert with_layers(small, 30).stacks == large.stacks
    assert with_layers(large, 12).stacks == small.stacks


@pytest.mark.parametrize(
    ("layers", "found"),
    [("aaaa", (0, 1)), ("abab", (0, 2)), ("baaa", (1, 1)), ("abc", (0, 3)), ("xababab", (1, 2))],
)
def test_the_earliest_and_shortest_pattern(layers: str, found: tuple[int, int]) -> None:
    assert pattern(list(layers)) == found  # type: ignore[arg-type]


def test_what_is_no_stack_is_refused() -> None:
    with pytest.raises(SetupError, match="is not a plain stack"):
        with_layers(load_model("llava-onevision-qwen2-7b"), 4)
