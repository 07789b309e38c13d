"""The tables of keys hold every key that a stack declares, and a key that is read moves what it says it does.

``tests/data/stack_keys/STACK.json``: the keys of the newest version looked at, as ``benchmarks/stack_keys.py`` found them.
``tests/data/turned_keys/STACK.yaml``: a whole file (``file``, read with the options ``given`` beside it), and for each key
that is read the value it is turned ``to``, and the fields of a setup that ``says`` the same. ``with`` are other keys that
the file has before and after. Fields are laid over those of the file without the turn; ``engine_options`` are merged. ``refused``
instead of ``says``: the words of the refusal; ``config`` what a model's config that is made of the keys has then.
"""

import json
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.errors import ConfigError, SetupError, UnsupportedOperationError
from memplan.estimator import Estimate, estimate
from memplan.estimator.step_time import step_time
from memplan.sources.catalog import load_gpu
from memplan.sources.job_models import looked_up
from memplan.sources.key_tables import Fate, key_table
from memplan.sources.models import load_model
from memplan.sources.stacks import StackSetup, read_stack
from memplan.training.setup import TrainingSetup

DATA = Path(__file__).parent.parent / "data"
DECLARED = sorted(path.stem for path in (DATA / "stack_keys").glob("*.json"))
TURNED = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((DATA / "turned_keys").glob("*.yaml"))
}


@pytest.mark.parametrize("stack", DECLARED)
def test_every_key_of_the_newest_version_is_sorted(stack: str) -> None:
    text = (DATA / "stack_keys" / f"{stack}.json").read_text(encoding="utf-8")
    table = key_table(stack)
    names = [name for keys in json.loads(text)["keys"].values() for name in keys]
    assert names
    assert [name for name in names if table.fate(name)[1] is None] == []


@pytest.mark.parametrize("stack", TURNED)
def test_every_key_that_is_read_is_turned(stack: str) -> None:
    turned = {each.partition(" ")[0] for each in TURNED[stack]["keys"]}
    assert {*key_table(TURNED[stack].get("table", stack)).read} - turned == set()


@pytest.mark.parametrize("stack", TURNED)
def test_turned_keys_say_what_options_say(stack: str) -> None:
    for key in TURNED[stack]["keys"]:
        try:
            turn_and_compare(stack, key)
        except BaseException as error:
            error.add_note(f"{stack}: {key}")
            raise


STILL: dict[str, frozenset[str]] = {
    "a factor, or what is drawn with another share": frozenset({
        "lora_alpha", "alpha", "lora_dropout", "use_rslora", "peft_use_rslora", "fake_gate_noise", "disable_dropout",
    }),
    "as many bytes another way": frozenset({
        "bf16", "dtype", "param_dtype", "autocast_dtype", "sdp_attention", "flex_attention",
    }),
    "what the file at hand lets make no difference: its card, model, parts or sizes": frozenset({
        "gradient_checkpointing_kwargs", "ddp_broadcast_buffers", "ddp_static_graph", "limit_all_gathers",
        "sync_module_states", "allgather_bucket_size", "sub_group_size", "type", "exclude_modules",
        "fake_balanced_gate", "freeze_audio_tower", "recompute_modules", "ddp_pad_buckets_for_high_nccl_busbw",
        "attention_softmax_in_fp32", "cross_entropy_loss_fusion", "no_masked_softmax_fusion", "no_bias_gelu_fusion",
        "no_bias_dropout_fusion", "make_vocab_size_divisible_by",
    }),
}  # fmt: skip
"""Keys, by their last word, whose turns move neither bytes nor time, and why."""


def moves(first: Estimate, second: Estimate) -> bool:
    """Whether anything that is told of two setups differs."""
    one, two = first.setup, second.setup
    if (one.num_gpus, one.gradient_accumulation_steps) != (
        two.num_gpus,
        two.gradient_accumulation_steps,
    ):
        return True
    if first.account != second.account or first.unmodelled != second.unmodelled:
        return True
    with suppress(UnsupportedOperationError):
        if step_time(first) != step_time(second):
            return True
    return first.run_source is not None and first.required_bytes != second.required_bytes


@pytest.mark.fuzz
def test_turned_keys_move_the_answer() -> None:
    """The bytes too, or the time, not the setup alone: what a setup says and nothing counts is found here."""
    gpu, still = load_gpu("h100"), set()

    def answer(found: StackSetup) -> Estimate:
        return estimate(load_model(found.model or "llama-3.2-1b"), found.setup, gpu)

    for stack, turned in TURNED.items():
        for key, turn in turned["keys"].items():
            name = key.partition(" ")[0]
            if "says" not in turn:
                continue
            values = laid_over(turned["file"], turn.get("with", {}))
            given = {**turned.get("given", {}), **turn.get("given", {})}
            reader = turned.get("stack", stack)
            before = read(values, reader, given)
            after = read(laid_over(values, {name: turn["to"]}), reader, given)
            if before.model != after.model:
                continue
            with suppress(SetupError):
                if not moves(answer(before), answer(after)):
                    still.add(name.rpartition(".")[2])
    assert still == frozenset().union(*STILL.values())


def turn_and_compare(stack: str, key: str) -> None:
    """A name may stand several times, with a space and a word behind it."""
    turned = TURNED[stack]
    turn, name = turned["keys"][key], key.partition(" ")[0]
    values = laid_over(turned["file"], turn.get("with", {}))
    given = {**turned.get("given", {}), **turn.get("given", {})}
    reader = turned.get("stack", stack)
    before = read(values, reader, given)
    if "refused" in turn:
        with pytest.raises(ConfigError, match=turn["refused"]):
            read(laid_over(values, {name: turn["to"]}), reader, given)
        return
    after = read(laid_over(values, {name: turn["to"]}), reader, given)
    if "note" in turn:
        assert any(turn["note"] in note for note in after.notes)
        return
    says = dict(turn.get("says", {}))
    model = says.pop("model", before.model)
    if "config" in turn:
        model = {**before.model, **turn["config"]}  # type: ignore[dict-item]
        model = {name: each for name, each in model.items() if name in (after.model or ())}
    assert after.model == model
    assert differing(said(before.setup, says), after.setup) == {}
    assert (after.setup, after.model) != (before.setup, before.model)


def read(values: dict[str, Any], stack: str, given: dict[str, Any]) -> StackSetup:
    return read_stack(values, stack, source="file.yaml", given=given)


def differing(expected: TrainingSetup, found: TrainingSetup) -> dict[str, tuple[Any, Any]]:
    """Fields of two setups that are not alike."""
    pairs = {
        each.name: (getattr(expected, each.name), getattr(found, each.name))
        for each in fields(TrainingSetup)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def said(setup: TrainingSetup, says: dict[str, Any]) -> TrainingSetup:
    """The setup with fields over it."""
    options = {**dict(setup.engine_options), **says.get("engine_options", {})}
    kept = {name: value for name, value in options.items() if value is not None}
    changes = {name: tuple(each) if name == "left_out" else each for name, each in says.items()}
    return looked_up(replace(setup, **{**changes, "engine_options": kept}))


def laid_over(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The values with dotted keys put into them; a key whose value is ``absent`` is taken out."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in more.items():
        place, inner = key.split("."), found
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        if value == "absent":
            inner.pop(place[-1], None)
        else:
            inner[place[-1]] = value
    return found


def test_a_key_has_the_fate_of_its_longest_name() -> None:
    assert key_table("axolotl").fate("datasets.0.path") == ("datasets", Fate.QUIET)
    assert key_table("axolotl").fate("no_such_key") == ("no_such_key", None)
    assert key_table("axolotl").fate("lr_scheduler_kwargs")[1] is Fate.QUIET
