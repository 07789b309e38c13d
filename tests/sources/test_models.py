"""What a user may call a model, and in which order it is looked for."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memplan.errors import (
    ConfigError,
    HubGatedError,
    HubNotFoundError,
    HubOfflineError,
    InputError,
    ModelNotFoundError,
    UnsupportedFamilyError,
    UsageError,
)
from memplan.model.heads import HeadSpec
from memplan.model.read_log import ReadLog
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models import hub
from memplan.sources.about_models.copied_models import copy_of
from memplan.sources.models import load_model

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@dataclass
class Reading:
    """What the reader of configs was asked."""

    config: Mapping[str, object]
    source: str
    name: str
    task: Task | None
    family: str | None
    num_labels: int | None


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """Replace the reader of configs, which has tests of its own."""
    readings: list[Reading] = []

    def read_model(
        config: Mapping[str, object],
        *,
        source: str,
        name: str,
        defaults: Mapping[str, object],
        task: Task | None,
        family: str | None,
        num_labels: int | None,
        log: ReadLog,
    ) -> ModelSpec:
        assert "llama" in defaults
        model_type = family or str(config.get("model_type"))
        log.part("", config, model_type, "")
        if model_type == "unheard-of":
            msg = f"{source}: model_type 'unheard-of' is not supported"
            raise UnsupportedFamilyError(msg)
        readings.append(Reading(config, source, name, task, family, num_labels))
        return replace(SPEC, name=name, family=model_type, source=source)

    monkeypatch.setattr("memplan.families.read_model", read_model)
    return readings


SPEC = ModelSpec(
    name="mine", family="llama", task=Task.CAUSAL_LM, vocab_size=8, hidden_size=8, context_length=8,
    stacks=(), head=HeadSpec(),
)  # fmt: skip


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str | None]]:
    """Replace the hub, and note what it is asked for."""
    requests: list[tuple[str, str | None, str | None]] = []

    def fetch_config(
        repo_id: str, *, revision: str | None = None, token: str | None = None
    ) -> tuple[dict[str, object], str]:
        requests.append((repo_id, revision, token))
        return dict(CONFIG), f"{repo_id}@0123456 on the Hugging Face hub"

    monkeypatch.setattr(hub, "fetch_config", fetch_config)
    return requests


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(hub, "fetch_config", fail)
    monkeypatch.chdir(tmp_path)


def write_config(folder: Path, config: object = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


# --- what a model may be ---------------------------------------------------------------------


@pytest.mark.parametrize("written", ["t5-3b", "google-t5/t5-3b", " T5-3B "])
def test_a_builtin_name_or_hub_id(reading: list[Reading], written: str) -> None:
    load_model(written)
    assert (reading[0].name, reading[0].source) == ("t5-3b", "built-in")
    assert reading[0].config["d_ff"] == 16384


def test_a_path_to_a_config(reading: list[Reading], tmp_path: Path) -> None:
    path = write_config(tmp_path / "run-7")
    load_model(str(path))
    assert reading[0] == Reading(CONFIG, str(path), "run-7", None, None, None)


def test_a_folder_with_a_config(reading: list[Reading], tmp_path: Path) -> None:
    path = write_config(tmp_path / "run-7")
    load_model(path.parent)
    assert (reading[0].name, reading[0].source) == ("run-7", str(path))


@pytest.mark.parametrize("written", [".", "./", "config.json", "../run-7"])
def test_a_relative_path_is_named_after_its_folder(
    reading: list[Reading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(write_config(tmp_path / "run-7").parent)
    load_model(written)
    assert reading[0].name == "run-7"


def test_a_file_of_another_name(reading: list[Reading], tmp_path: Path) -> None:
    write_config(tmp_path).rename(tmp_path / "small.json")
    load_model("small.json")
    assert reading[0].name == "small"


def test_a_home_folder(
    reading: list[Reading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_config(tmp_path / "mine")
    load_model("~/mine")
    assert reading[0].name == "mine"


def test_a_yaml_spec(reading: list[Reading], tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: my-llama\nmodel_type: llama\nhidden_size: 64\n")
    load_model(str(path))
    assert reading[0] == Reading(
        {"model_type": "llama", "hidden_size": 64}, str(path), "my-llama", None, None, None
    )


def test_a_yaml_spec_without_a_name_is_named_after_its_file(
    reading: list[Reading], tmp_path: Path
) -> None:
    (tmp_path / "spec.yml").write_text("model_type: llama")
    load_model("spec.yml")
    assert reading[0].name == "spec"


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({}, "llama"),
        ({"name": "n"}, "n"),
        ({"_name_or_path": "a/b"}, "a/b"),
        ({"name": 3}, "llama"),
    ],
)
def test_a_config_dict(reading: list[Reading], extra: dict[str, object], name: str) -> None:
    config = {**CONFIG, **extra}
    load_model(config)
    assert reading[0] == Reading(config, "config", name, None, None, None)


def test_a_model_spec_is_returned() -> None:
    assert load_model(SPEC) is SPEC


def test_a_hub_id(
    reading: list[Reading], fetched: list[tuple[str, str | None, str | None]]
) -> None:
    load_model("owner/model", revision="v2", token="hf_x")
    assert fetched == [("owner/model", "v2", "hf_x")]
    assert (reading[0].name, reading[0].config) == ("owner/model", CONFIG)
    assert reading[0].source == "owner/model@0123456 on the Hugging Face hub"


def test_a_bare_name_like_no_builtin_is_a_legacy_hub_id(
    reading: list[Reading], fetched: list[tuple[str, str | None, str | None]]
) -> None:
    load_model("ctrl")
    assert fetched == [("ctrl", None, None)]
    assert reading[0].name == "ctrl"


@pytest.mark.parametrize(
    ("written", "repo_id"),
    [
        ("t5-3b", "google-t5/t5-3b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    ],
)
def test_a_revision_of_a_builtin_is_fetched(
    reading: list[Reading],
    fetched: list[tuple[str, str | None, str | None]],
    written: str,
    repo_id: str,
) -> None:
    load_model(written, revision="abc")
    assert fetched == [(repo_id, "abc", None)]
    assert reading[0].name == repo_id


# --- which comes first -----------------------------------------------------------------------


def test_a_folder_comes_before_a_builtin(reading: list[Reading], tmp_path: Path) -> None:
    write_config(tmp_path / "t5-3b")
    load_model("t5-3b")
    assert reading[0].config == CONFIG


def test_a_folder_without_a_config_does_not_hide_a_builtin(
    reading: list[Reading], tmp_path: Path
) -> None:
    (tmp_path / "t5-3b").mkdir()
    load_model("t5-3b")
    assert reading[0].source == "built-in"
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        load_model("./t5-3b")


def test_a_folder_comes_before_the_hub(reading: list[Reading], tmp_path: Path) -> None:
    write_config(tmp_path / "owner" / "model")
    load_model("owner/model")
    assert reading[0].name == "model"


# --- options ---------------------------------------------------------------------------------


def test_passes_the_options_on(reading: list[Reading]) -> None:
    load_model(CONFIG, "masked-lm", family="bert", num_labels=3)
    assert reading[0] == Reading(CONFIG, "config", "llama", Task.MASKED_LM, "bert", 3)
    load_model(CONFIG, Task.BASE)
    assert reading[1].task is Task.BASE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"model": "t5-3b", "task": "causal"}, "Did you mean 'causal-lm'?", id="task"),
        pytest.param({"model": "t5-3b", "num_labels": 0}, "at least 1", id="no-labels"),
        pytest.param({"model": CONFIG, "revision": "v1"}, "revision is for", id="dict-revision"),
        pytest.param(
            {"model": "./a.json", "revision": "v1"}, "revision is for", id="path-revision"
        ),
        pytest.param({"model": SPEC, "task": "base"}, "ModelSpec is complete", id="spec-task"),
        pytest.param({"model": SPEC, "num_labels": 3}, "ModelSpec is complete", id="spec-labels"),
        pytest.param({"model": None}, "of type NoneType", id="none"),
        pytest.param({"model": [CONFIG]}, "of type list", id="list"),
    ],
)
def test_refuses_arguments_that_do_not_go_together(
    reading: list[Reading], arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(**arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert reading == []


def test_an_unknown_family_is_read_as_the_nearest_one_only_on_request(
    reading: list[Reading],
) -> None:
    config = {
        "model_type": "unheard-of", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "mlp_bias": False, "attention_bias": False, "pretraining_tp": 1,
    }  # fmt: skip
    config["novelty_factor"] = 3
    with pytest.raises(UnsupportedFamilyError, match=r"most like llama \(not read: novelty_factor"):
        load_model(config)
    model = load_model(config, allow_guess=True)
    assert reading[-1].family == "llama"
    assert "read as llama (not read: novelty_factor)" in model.assumptions[0]


def test_a_named_family_is_never_guessed_over(reading: list[Reading]) -> None:
    with pytest.raises(UnsupportedFamilyError):
        load_model(CONFIG, family="unheard-of", allow_guess=True)
    assert reading == []


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "words"),
    [
        pytest.param("", "name is empty", id="empty"),
        pytest.param("   ", "name is empty", id="blank"),
        pytest.param("absent.json", "there is no such file or folder", id="absent-json"),
        pytest.param("specs/absent.YAML", "there is no such file or folder", id="absent-yaml"),
        pytest.param("./absent", "there is no such file or folder", id="absent-folder"),
        pytest.param("/absent/config", "there is no such file or folder", id="absent-absolute"),
        pytest.param("~nobody-of-this-name/x", "", id="absent-home"),
        pytest.param("t5-3bb", "Did you mean 't5-3b'?", id="near-miss"),
        pytest.param("llama3.1-8", "Did you mean 'llama-3.1-8b'?", id="near-miss-of-an-alias"),
        pytest.param("a/b/c", "there is no model 'a/b/c'", id="three-parts"),
        pytest.param("two words", "there is no model 'two words'", id="space"),
        pytest.param("null\0byte", r"there is no model 'null\x00byte'", id="null-byte"),
        pytest.param("line\nbreak", r"there is no model 'line\nbreak'", id="line-break"),
        pytest.param("./null\0byte.json", "", id="null-byte-path"),
        pytest.param("n" * 5000 + ".json", "", id="too-long-a-path"),
        pytest.param(
            "https://huggingface.co/datasets/google/c4", "is no page of a model", id="url"
        ),
    ],
)
def test_a_name_that_leads_nowhere(written: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(written)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"the folder holds no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("model_type: llama\nhiden_size: 64", "hiden_size: is no key of a llama config. "
                     "Did you mean 'hidden_size'?", id="slip"),
        pytest.param("model_type: t5\nnum_hidden_layer: 2", "Did you mean 'num_hidden_layers'?",
                     id="slip-in-a-common-name"),
        pytest.param("model_type: llama\nzzz: 1", "zzz: is no key of a llama config", id="unknown"),
        pytest.param("model_type: llama\nname: 7", "name: must be text", id="name-is-a-number"),
        pytest.param("model_type: llama\nname: ' '", "name: must be text", id="name-is-blank"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("reading")
def test_a_yaml_spec_with_a_slip(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model("spec.yaml")
    assert str(caught.value).startswith("spec.yaml: ")
    assert words in str(caught.value)


def test_the_keys_of_a_yaml_spec_are_those_of_the_named_family(
    reading: list[Reading], tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text("n_embd: 64")
    load_model("spec.yaml", family="gpt2")
    assert reading[0].family == "gpt2"
    with pytest.raises(ConfigError, match="n_embd: is no key of a llama config"):
        load_model("spec.yaml", family="llama")


def test_a_config_of_others_may_hold_any_key(reading: list[Reading], tmp_path: Path) -> None:
    load_model(write_config(tmp_path, {**CONFIG, "their_own_key": 1}))
    assert reading[0].config["their_own_key"] == 1


def test_a_config_dict_with_other_keys_than_text() -> None:
    with pytest.raises(ConfigError, match="every key must be text"):
        load_model({1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", [HubNotFoundError, HubOfflineError])
def test_the_hubs_refusal_suggests_a_builtin(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        msg = "the hub says no"
        raise kind(msg)

    monkeypatch.setattr(hub, "fetch_config", refuse)
    with pytest.raises(kind, match=r"the hub says no\. Did you mean the built-in 't5-3b'\?"):
        load_model("google/t5-3bb")
    with pytest.raises(kind, match=r"the hub says no$"):
        load_model("owner/entirely-different-0815")


@pytest.mark.parametrize(
    ("name", "builtin", "packed"),
    [
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit", "llama-3.2-1b", "bitsandbytes"),
        ("mlx-community/Qwen2.5-7B-Instruct-4bit", "qwen2.5-7b-instruct", None),
        ("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "llama-3-8b", "awq"),
        ("mistralai/Ministral-3-3B-Reasoning-2512", "ministral-3-3b", None),
        ("somebody/gemma-7b", "gemma-7b", None),
    ],
)
def test_a_copy_has_the_builtins_shape(
    monkeypatch: pytest.MonkeyPatch, name: str, builtin: str, packed: str | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        msg = "the hub says no"
        raise HubOfflineError(msg)

    monkeypatch.setattr(hub, "fetch_config", refuse)
    model = load_model(name)
    assert model.num_params == load_model(builtin).num_params
    assert dict(model.quantization).get("quant_method") == packed
    assert any(f"{name}: the built-in {builtin}'s shape" in each for each in model.assumptions)


def test_a_copy_by_name_of_another_owner_is_asked_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**CONFIG, "num_hidden_layers": 3}
    monkeypatch.setattr(hub, "fetch_config", lambda *_, **__: (config, "the hub"))
    assert load_model("somebody/llama-3.1-8b").num_layers == 3


@pytest.mark.parametrize("name", ["unsloth/llama-3.1-9b", "unsloth/llama-3.1-8b-pruned"])
def test_another_name_is_no_copy(name: str) -> None:
    assert copy_of(name) is None


def test_a_gated_model_is_no_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        msg = "it is gated"
        raise HubGatedError(msg)

    monkeypatch.setattr(hub, "fetch_config", refuse)
    with pytest.raises(HubGatedError, match=r"it is gated$"):
        load_model("meta-llama/Llama-3.1-8B-Private")


def test_a_builtin_costs_no_library(checkout: Path) -> None:
    code = (
        "import sys, memplan; memplan.load_model('llama-3.1-8b');"
        "print(sorted({'yaml', 'huggingface_hub', 'rich', 'typer', 'difflib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- with the real reader --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-llama-13b", "tiny-t5"])
def test_the_examples_are_read(checkout: Path, name: str) -> None:
    model = load_model(checkout / "configs" / "models" / f"{name}.yaml")
    assert model.name == name


def test_every_builtin_is_read() -> None:
    from memplan.sources.about_models.registry import builtin_names

    for name in builtin_names():
        model = load_model(name)
        assert (model.name, model.source) == (name, "built-in")


def test_every_example_is_covered(checkout: Path) -> None:
    found = {path.stem for path in (checkout / "configs" / "models").glob("*.y*ml")}
    assert found == {"my-llama-13b", "tiny-t5"}


def test_a_bad_size_names_the_file_and_the_key(tmp_path: Path) -> None:
    path = write_config(tmp_path, {**CONFIG, "hidden_size": -64})
    with pytest.raises(InputError, match=r"config\.json: hidden_size: "):
        load_model(path)


def test_a_common_name_decides_over_the_class_own() -> None:
    """transformers 5.23 sets it last (``attribute_map``): a BigBird-Pegasus with both has 220 million parameters, not 195."""
    config = {"model_type": "bart", "d_model": 64, "encoder_layers": 3, "decoder_layers": 2}
    both = load_model({**config, "num_hidden_layers": 5})
    assert both.num_params == load_model({**config, "encoder_layers": 5}).num_params
    (note,) = (each for each in both.assumptions if "encoder_layers" in each)
    assert note.startswith("encoder_layers: num_hidden_layers says something else, and decides")
    same = load_model({**config, "num_hidden_layers": 3})
    assert not any("says something else" in each for each in same.assumptions)
