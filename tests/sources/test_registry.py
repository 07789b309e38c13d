"""The built-in models: every name leads to one entry, and its sizes are the published ones."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.families import supported_families
from memplan.graph.counts import num_parameters
from memplan.sources.about_models import entry_file
from memplan.sources.about_models.defaults import class_defaults, known_keys
from memplan.sources.about_models.registry import (
    builtin_config,
    builtin_names,
    find_builtin,
    nearest_builtins,
)
from memplan.sources.models import load_model

pytestmark = pytest.mark.long

NAMES = builtin_names()
FLAT_FAMILIES = {
    "bert", "bloom", "distilbert", "gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral",
    "mixtral", "mt5", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "t5",
    "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
"""Families whose sizes all stand at the top of the config, under names that are compared."""
SIZE_KEYS = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "type_vocab_size",
    "tie_word_embeddings", "num_decoder_layers", "d_ff", "d_kv", "ffn_dim", "hidden_dim",
    "word_embed_proj_dim", "do_layer_norm_before", "feed_forward_proj", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "rotary_pct",
    "partial_rotary_factor",
}  # fmt: skip
"""What decides the number of parameters or of positions."""

EXCEPTIONS = {
    # Rewritten by the tool that republished these files.
    ("meta-llama/Llama-2-7b-chat-hf", "max_position_embeddings"),
}
"""Reference files that do not say what the publisher's do."""


def sizes_of(config: dict[str, object]) -> dict[str, object]:
    """Return the sizes of a config under their common names, as the class reads them."""
    row = class_defaults()[str(config["model_type"])]
    renamed = {own: common for common, own in dict(row.get("renamed", {})).items()}  # type: ignore[call-overload]
    if config["model_type"] == "bloom":
        renamed["n_embed"] = "hidden_size"
    values = {**dict(row["defaults"]), **config}  # type: ignore[call-overload]
    if "n_embed" in config:
        del values["hidden_size"]
    sizes = {renamed.get(key, key): value for key, value in values.items()}
    if sizes.get("num_key_value_heads") is None:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if sizes.get("head_dim") is None:
        sizes["head_dim"] = int(sizes["hidden_size"]) // int(sizes["num_attention_heads"])
    if "d_ff" in sizes:
        sizes.setdefault("num_decoder_layers", sizes["num_hidden_layers"])
        sizes.setdefault("tie_word_embeddings", True)
    if config["model_type"] == "opt":
        sizes.setdefault("word_embed_proj_dim", sizes["hidden_size"])
    if config["model_type"] == "gpt_neox":
        sizes.setdefault("rotary_pct", 0.25)
    return {key: value for key, value in sizes.items() if key in SIZE_KEYS}


def test_there_are_many_and_of_every_family() -> None:
    families = {find_builtin(name).family for name in NAMES}  # type: ignore[union-attr]
    assert len(NAMES) >= 450
    assert len(families) >= 140
    assert set(supported_families()) >= families > FLAT_FAMILIES


UNDECLARED = {
    "falcon_h1": {"head_dim"}, "lfm2": {"block_ff_dim"},
    "kimi_linear": {
        "first_k_dense_replace", "linear_attn_config", "num_experts", "num_experts_per_token",
        "num_shared_experts",
    },
}  # fmt: skip
"""Keys that a class reads and its config class does not declare (``modeling_falcon_h1.py``, ``configuration_lfm2.py``)."""


def test_every_entry_is_found_and_well_formed() -> None:
    for name in NAMES:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)
        entry = find_builtin(name)
        assert entry is not None
        assert entry.name == name
        assert re.fullmatch(r"[\w-]+/[\w.-]+", entry.hub_id), name
        assert entry.dtype in {"float32", "float16", "bfloat16"}, name
        if entry.family in class_defaults():
            known = known_keys(entry.family) | UNDECLARED.get(entry.family, set())
            assert entry.sizes.keys() <= known, name
        for written in (entry.hub_id, *entry.aliases):
            for spelling in (written, written.lower(), f" {written.upper()} "):
                found = find_builtin(spelling)
                assert found is not None, spelling
                assert found.name == name, spelling


def test_says_only_what_differs_from_the_class() -> None:
    for name in NAMES:
        entry = find_builtin(name)
        assert entry is not None
        row: Any = class_defaults().get(entry.family, {})
        defaults = row.get("defaults", {})
        idle = {
            key
            for key, value in entry.sizes.items()
            if key in defaults and value == defaults[key] and type(value) is type(defaults[key])
        }
        # The number of key-value heads is said even then: many a class takes it from the heads.
        assert idle <= {"num_key_value_heads", "head_dim"}, name


def test_no_two_entries_share_a_name_or_an_alias() -> None:
    entries = [entry for entry in map(find_builtin, NAMES) if entry is not None]
    written = Counter(
        text.lower() for entry in entries for text in (entry.name, entry.hub_id, *entry.aliases)
    )
    assert [text for text, times in written.items() if times > 1] == []


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("t5-3b", "t5-3b"),
        ("google-t5/t5-3b", "t5-3b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("google/flan-t5-base", "flan-t5-base"),
        ("facebook/xlm-roberta-xxl", "xlm-roberta-xxl"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("BERT-base-uncased", "bert-base-uncased"),
        ("bigscience/bloom", "bloom-176b"),
    ],
)
def test_known_spellings(written: str, name: str) -> None:
    found = builtin_config(written)
    assert found is not None
    assert found[0] == name


def test_a_config_is_the_callers_own() -> None:
    first = builtin_config("t5-3b")
    assert first is not None
    first[1].clear()
    second = builtin_config("t5-3b")
    assert second is not None
    assert second[1] == {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "dtype": "float32",
        "d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_layers": 24, "num_decoder_layers": 24,
        "num_heads": 32, "n_positions": 512,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["t5-v1.1", "flan-t5", "byt5", "mt5"])
def test_checkpoints_with_two_matrices_say_so(family: str) -> None:
    entries = [find_builtin(name) for name in NAMES if name.startswith(family)]
    assert len(entries) == 5
    assert all(entry and entry.sizes["tie_word_embeddings"] is False for entry in entries)


@pytest.mark.parametrize(
    ("written", "guess"),
    [
        ("t5-3bb", ("t5-3b",)),
        ("lama-3.1-8b", ("llama-3.1-8b",)),
        ("google/T5-3B", ("t5-3b",)),
        ("bert-base-uncase", ("bert-base-uncased",)),
        ("code-llama-7", ("codellama-7b",)),
        ("t5", ("t5-small", "t5-base", "t5-large")),
        ("someone/GPT2-X", ("gpt2-xl",)),
        ("ctrl", ()),
        ("", ()),
    ],
)
def test_near_misses(written: str, guess: tuple[str, ...]) -> None:
    assert builtin_config(written) is None
    assert nearest_builtins(written) == guess


@pytest.mark.parametrize("name", ["", " ", "t5", "/", "google-t5/", "t5-3b/config.json"])
def test_unknown_names(name: str) -> None:
    assert builtin_config(name) is None


@pytest.mark.parametrize("written", ["good", "GOOD", "a/good", "A/Good", "other/Good"])
def test_a_lookup_does_not_read_the_other_entries(
    monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    text = b"""{
  "models": {
    "good": {"hub_id": "a/Good", "aliases": ["Other/good"], "family": "gpt2","""
    text += b""" "architecture": "GPT2Model", "dtype": "float32", "sizes": {}},
    "bad": }
}"""
    monkeypatch.setattr(entry_file, "_read", lambda _: text)
    found = find_builtin(written)
    assert found is not None
    assert (found.name, found.hub_id, found.aliases) == ("good", "a/Good", ("Other/good",))


@pytest.mark.parametrize("written", ["llama", "float32", "hub_id", "sizes", "models", "GPT2Model"])
def test_what_stands_in_an_entry_but_names_none(written: str) -> None:
    assert find_builtin(written) is None


def test_parameters_equal_those_of_transformers(checkout: Path) -> None:
    """The counts were made by transformers itself: see the file's ``source``."""
    counted = json.loads((checkout / "tests" / "data" / "builtin_params.json").read_text())
    found = {name: num_parameters(load_model(name)) for name in NAMES}
    assert found == {name: counted["total_params"][name] for name in NAMES}


@pytest.mark.reference
def test_sizes_equal_the_published_configs(reference_dir: Path) -> None:
    compared, differing = 0, []
    for line in (reference_dir / "hf_configs.jsonl").read_text().splitlines():
        record = json.loads(line)
        found = builtin_config(record["hf_id"])
        if found is None or found[1]["model_type"] not in FLAT_FAMILIES:
            continue
        compared += 1
        ours, theirs = sizes_of(found[1]), sizes_of(record["config"])
        differing += [
            (record["hf_id"], key, ours.get(key), theirs.get(key))
            for key in SIZE_KEYS
            if ours.get(key) != theirs.get(key) and (record["hf_id"], key) not in EXCEPTIONS
        ]
    assert compared > 80
    assert differing == []


def test_sizes_equal_those_that_litgpt_has(checkout: Path) -> None:
    """A source for built-ins of which no published config is among the references."""
    told = json.loads((checkout / "tests" / "data" / "litgpt_sizes.json").read_text())["sizes"]
    keys = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    )  # fmt: skip
    for name, sizes in told.items():
        found = builtin_config(name)
        assert found is not None, name
        ours = sizes_of(found[1])
        assert [ours.get(key) for key in keys] == sizes, name


OTHERWISE_PUBLISHED = {
    # The activation that transformers uses since its own repair of these files.
    "google/gemma-7b",
    # Rewritten by the tool that republished this file.
    "meta-llama/Llama-2-7b-chat-hf",
    # The checkpoint holds two matrices; the file leaves the key out.
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
}
"""Reference files whose model differs from the built-in one, and why."""


@pytest.mark.reference
def test_counts_equal_those_of_the_published_configs(checkout: Path, reference_dir: Path) -> None:
    counted = json.loads((checkout / "tests" / "data" / "builtin_params.json").read_text())
    compared, differing = 0, set()
    for line in (reference_dir / "hf_configs.jsonl").read_text().splitlines():
        record = json.loads(line)
        model, truth = find_builtin(record["hf_id"]), record["truth"]
        if model is None or record["fidelity"] in {"modified", "trimmed"}:
            continue
        if truth["status"] == "ok" and truth["task_class"] == model.architecture:
            compared += 1
            if truth["total_params"] != counted["total_params"][model.name]:
                differing.add(record["hf_id"])
    assert compared > 300
    assert differing == {"mistralai/Mistral-Small-3.2-24B-Instruct-2506"}


@pytest.mark.reference
def test_models_equal_those_of_the_published_configs(
    reference_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of sizes that a config leaves out reads it once more for each: ``test_config_slips.py`` looks at it."""
    monkeypatch.setattr(
        "memplan.sources.about_models.config_check.default_notes", lambda *_: list[str]()
    )
    compared, differing = 0, set()
    for line in (reference_dir / "hf_configs.jsonl").read_text().splitlines():
        record = json.loads(line)
        found = builtin_config(record["hf_id"])
        if found is None or record["fidelity"] in {"modified", "trimmed"}:
            continue
        compared += 1
        ours = load_model(found[1])
        theirs = load_model(record["config"], task=ours.task, num_labels=record.get("num_labels"))
        theirs = replace(
            theirs,
            name=ours.name,
            checkpoint_dtype=ours.checkpoint_dtype,
            quantization=ours.quantization,  # a built-in is the model, whatever files there are of it
            assumptions=ours.assumptions,
            blueprint=ours.blueprint,  # holds the config as written, class defaults left out or not
        )
        if theirs != ours:
            differing.add(record["hf_id"])
    assert compared > 300
    assert differing == OTHERWISE_PUBLISHED
