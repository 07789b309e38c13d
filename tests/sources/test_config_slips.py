"""A size left out or misspelt is said or refused: over every type, key by key."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError, ExitCode, MemplanError
from memplan.families import supported_families
from memplan.model.config import TIED_OR_NOT, TYING
from memplan.sources.about_models.defaults import class_defaults
from memplan.sources.about_models.registry import builtin_models
from memplan.sources.models import load_model
from tests.sources.slips import (
    complete_config,
    is_silent,
    part_of,
    silent_changes,
    size_keys,
    sizes_in,
    slips,
    with_name,
    with_value,
)

pytestmark = pytest.mark.long

Run = Callable[..., Any]


def other_sizes(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str, dict[str, Any]]]:
    """Configs in which one size is not the class's default, and makes another model."""
    try:
        usual = sizes_in(config)
    except MemplanError:
        return
    for path, key in size_keys(config):
        value = part_of(config, path)[key]
        if isinstance(value, list):
            candidates: list[Any] = [
                [2 * each if isinstance(each, int) else each for each in value]
            ]
        else:
            candidates = [2 * value or 1, value + 1, 1]
        for other in candidates:
            changed = with_value(config, path, key, other)
            try:
                if sizes_in(changed) != usual:
                    yield path, key, changed
                    break
            except MemplanError:
                continue


def silent_in(family: str, *, most_sizes: int, most_slips: int) -> tuple[int, list[str]]:
    """Sizes of this type that were tried, and how their loss or misspelling goes unsaid."""
    row: Any = class_defaults().get(family, {})
    sizes = list(islice(other_sizes(complete_config(family, row)), most_sizes))
    found = []
    for number, (path, key, full) in enumerate(sizes):
        place = ".".join((*path, key))
        if is_silent(full, with_name(full, path, key, None)):
            found.append(f"{place} left out")
        ways = list(slips(key, everywhere=most_slips > FEW))
        for name in ways[number % len(ways) :][:most_slips]:
            if name not in part_of(full, path) and is_silent(
                full, with_name(full, path, key, name)
            ):
                found.append(f"{place} as {name}")
    return len(sizes), found


FEW = 4
MANY = 10_000


def test_a_size_left_out_or_misspelt_is_said_or_refused() -> None:
    """Most types have sizes that count, so that something is tried."""
    families = supported_families()
    found = {family: silent_in(family, most_sizes=1, most_slips=1) for family in families}
    assert {family: silent for family, (_, silent) in found.items() if silent} == {}
    assert sum(tried for tried, _ in found.values()) > 0.6 * len(families)


def test_a_number_of_layers_left_out_is_said() -> None:
    """Layers that are alike have the same weights, however many there are: SigLIP's texts have no stack that counts them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    full = {
        "model_type": "siglip",
        "text_config": {**sizes, "num_hidden_layers": 3},
        "vision_config": {**sizes, "num_hidden_layers": 2},
    }
    for part in ("text_config", "vision_config"):
        assert not is_silent(full, with_name(full, (part,), "num_hidden_layers", None))


@pytest.mark.fuzz
def test_every_size_left_out_or_misspelt_is_said_or_refused() -> None:
    found = {
        family: silent_in(family, most_sizes=MANY, most_slips=MANY)[1]
        for family in supported_families()
    }
    assert {family: silent for family, silent in found.items() if silent} == {}


@pytest.mark.fuzz
@pytest.mark.reference
def test_published_configs_with_a_size_left_out_or_misspelt(reference_dir: Path) -> None:
    found: list[str] = []
    seen: set[str] = set()
    for line in (reference_dir / "hf_configs.jsonl").read_text().splitlines():
        config = json.loads(line)["config"]
        family = str(config.get("model_type"))
        if family not in seen and is_read(config):
            seen.add(family)
            found += silent_changes(config, everywhere=False)
    assert len(seen) > 200
    assert found == []


@pytest.mark.reference
def test_published_configs_are_read_and_complete_ones_say_nothing(reference_dir: Path) -> None:
    """No config is refused for a key; four in five say every size themselves.

    Whether the output matrix is tied is said only of types of which some are and some are not.
    """
    refused, noted, tied, num_read = [], 0, 0, 0
    for line in (reference_dir / "hf_configs.jsonl").read_text().splitlines():
        record = json.loads(line)
        try:
            model = load_model(record["config"])
        except MemplanError as error:
            if "allow_unknown_keys" in str(error):
                refused.append(f"{record['hf_id']}: {error}")
            continue
        num_read += 1
        said = [each for text in model.assumptions if DEFAULT in text for each in named(text)]
        noted += any(each != "tie_word_embeddings" for each in said)
        tied += "tie_word_embeddings" in said
        if record["hf_id"] in COMPLETE:
            assert {*said} <= {"tie_word_embeddings"}, record["hf_id"]
            assert len(model.assumptions) == bool(said), record["hf_id"]
        assert said.count("tie_word_embeddings") <= 1, record["hf_id"]
    assert refused == []
    assert num_read >= 567
    assert noted <= 0.2 * num_read
    assert 0 < tied <= 0.1 * num_read


def named(text: str) -> list[str]:
    """The keys that a note of defaults names.

    >>> named("num_layers 2, vocab_size 8: not in the config, LlamaConfig's defaults")
    ['num_layers', 'vocab_size']
    """
    return [each.split()[0] for each in text.partition(DEFAULT)[0].split(", ")]


def test_heads_and_tying_that_a_config_leaves_out_are_said() -> None:
    whole = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
        "max_position_embeddings": 64, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    assert load_model(whole).assumptions == ()
    without = {name: whole[name] for name in whole if name != "num_key_value_heads"}
    (note,) = load_model(without).assumptions
    assert note == "num_key_value_heads 4: not in the config, LlamaConfig's default"
    without = {name: whole[name] for name in whole if name != "tie_word_embeddings"}
    (note,) = load_model(without).assumptions
    assert note == "tie_word_embeddings false: not in the config, LlamaConfig's default"


@pytest.mark.reference
def test_types_that_are_always_tied_or_never_say_nothing_of_it(reference_dir: Path) -> None:
    """Built-ins and records of a type that is not listed all go by its class."""
    own = class_defaults()
    lines = (reference_dir / "hf_configs.jsonl").read_text().splitlines()
    configs = [model.config() for model in builtin_models()]
    differ: set[object] = set()
    for config in configs + [json.loads(line)["config"] for line in lines]:
        of_class = own.get(config.get("model_type", ""), {}).get("defaults", {}).get(TYING)
        if None not in (of_class, config.get(TYING)) and of_class != config[TYING]:
            differ.add(config["model_type"])
    assert differ - TIED_OR_NOT == set()


DEFAULT = ": not in the config"
COMPLETE = {
    "openai-community/gpt2-medium", "01-ai/Yi-34B", "google-t5/t5-base", "facebook/opt-6.7b",
    "google-bert/bert-base-chinese",
}  # fmt: skip


def is_read(config: dict[str, Any]) -> bool:
    try:
        load_model(config)
    except MemplanError:
        return False
    return True


# --- one by one ------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 5120,
    "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824,
    "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16",
    "num_key_value_heads": 40, "tie_word_embeddings": False,
}  # fmt: skip


def changed(**changes: object) -> dict[str, object]:
    """The config with these keys; None takes one away."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}


def test_a_complete_config_assumes_nothing() -> None:
    assert load_model(LLAMA).assumptions == ()


def test_a_misspelt_key_is_refused_with_the_absent_one() -> None:
    config = changed(num_hidden_layers=None, num_hidden_layer=40)
    with pytest.raises(ConfigError, match=r"num_hidden_layer: .* Did you mean 'num_hidden_layers'"):
        load_model(config)
    model = load_model(config, allow_unknown_keys=True)
    assert model.num_layers == 32
    assert model.assumptions == (
        "num_hidden_layer: is no key of a llama config, not read",
        "num_hidden_layers 32: not in the config, LlamaConfig's default",
    )


def test_a_key_beside_the_one_it_resembles_is_harmless() -> None:
    assert load_model(changed(num_hidden_layer=12, my_own_key=1)).assumptions == ()


def test_another_classs_name_is_said_not_to_be_read() -> None:
    model = load_model(changed(num_hidden_layers=None, n_layer=40))
    assert "n_layer: is no key of a llama config, not read" in model.assumptions


def test_bloom_without_its_width() -> None:
    model = load_model({
        "model_type": "bloom", "n_layer": 30, "n_head": 32, "vocab_size": 250880,
        "tie_word_embeddings": True,
    })  # fmt: skip
    assert model.assumptions == ("hidden_size 64: not in the config, BloomConfig's default",)


def test_nested_configs_alike() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    config = {
        "model_type": "llava", "text_config": text, "vision_config": CLIP_TOWER, "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "tie_word_embeddings": False,
    }  # fmt: skip
    (said,) = load_model(config).assumptions
    assert said == "num_hidden_layers 32: not in the config's text_config, LlamaConfig's default"
    with pytest.raises(ConfigError, match=r"text_config\.hiden_size"):
        load_model({**config, "text_config": {**text, "hiden_size": 5120, "hidden_size": None}})
    with pytest.raises(ConfigError, match="Did you mean 'vision_config'"):
        load_model({**config, "vision_confg": CLIP_TOWER, "vision_config": None})
    without = {**config, "text_config": LLAMA}
    del without["vision_config"]
    absent = load_model(without).assumptions
    assert absent == ("vision_config: not in the config, CLIPVisionConfig's defaults",)


CLIP_TOWER = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "patch_size": 14,
    "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    "num_channels": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (fp8): not read"),
        ({"add_cross_attention": True}, "cross-attention is not counted"),
        ({"architectures": ["LlamaForFooBar"]}, "no known class of llama, counted as causal-lm"),
        ({"architectures": ["Zorblax"]}, "architectures 'Zorblax'"),
        ({"model_type": None}, "model_type llama: not in the config, taken from its architectures"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn: not read"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads: not read"),
        ({"gradient_checkpointing": True}, "the setup says what is recomputed"),
        ({"attn_implementation": "eager"}, "the setup's attention kernel is counted"),
    ],
)
def test_said(changes: dict[str, object], words: str) -> None:
    (said,) = load_model(changed(**changes)).assumptions
    assert words in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": ""}, "model_type: is empty"),
        ({"model_type": 5}, "model_type: expected a name"),
        ({"torch_dtype": "bfloat17"}, "Did you mean 'bfloat16'"),
        ({"dtype": 16}, "dtype: 16 is no dtype"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list"),
    ],
)
def test_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model(changed(**changes))


SPEC = """
model_type: llava
tie_word_embeddings: false
vision_feature_layer: -2
vision_feature_select_strategy: default
text_config: {model_type: llama, hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2,
  intermediate_size: 128, vocab_size: 99, max_position_embeddings: 64, num_key_value_heads: 4,
  tie_word_embeddings: false%s}
vision_config: {model_type: clip_vision_model, hidden_size: 64, image_size: 28, patch_size: 14,
  intermediate_size: 128, num_attention_heads: 4, num_hidden_layers: 2, num_channels: 3}
"""


def test_a_spec_is_strict_at_every_depth(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC % "")
    assert load_model(path).assumptions == ()
    path.write_text(SPEC % ", zzz: 1")
    with pytest.raises(ConfigError, match=r"text_config\.zzz: is no key"):
        load_model(path)
    path.write_text(SPEC % ", rope_scaling: {rope_type: linear, factr: 2}")
    with pytest.raises(ConfigError, match=r"rope_scaling\.factr: .*'factor'"):
        load_model(path)


@pytest.mark.parametrize(
    "command", ["estimate", "sweep", "plan", "explain", "models", "flops", "compare"]
)
def test_printed_by_every_command(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(num_hidden_layers=None, num_hidden_layer=40)))
    more = {"sweep": ("--gpus", "8"), "plan": ("--gpu", "h100")}.get(command, ())
    refused = run(command, str(path), *more)
    assert refused.exit_code == ExitCode.INPUT
    assert "num_hidden_layers" in refused.stderr
    answer = run(command, str(path), *more, "--allow-unknown-keys")
    assert answer.exit_code == ExitCode.OK
    words = "num_hidden_layers 32: not in the config, LlamaConfig's default"
    assert words in " ".join(answer.stdout.split())
    if command != "models":
        written = run(command, str(path), *more, "--allow-unknown-keys", "--format", "json")
        assert words in json.loads(written.stdout)["assumptions"]


def test_a_key_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}')
    with pytest.raises(ConfigError, match="'hidden_size' is given twice"):
        load_model(path)


def test_builtin_models_assume_nothing() -> None:
    assert load_model("bloom-7b1").assumptions == ()
