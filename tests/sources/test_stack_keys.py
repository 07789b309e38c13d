"""The tables of keys hold every key that a stack declares, and a key that is read moves what it says it does.

``tests/data/stack_keys/STACK.json``: the keys of the newest version looked at, as ``benchmarks/stack_keys.py`` found them.
``tests/data/turned_keys/STACK.yaml``: a whole file (``file``, read with the options ``given`` beside it), and for each key
that is read the value it is turned ``to``, and the fields of a setup that ``says`` the same. ``with`` are other keys that
the file has before and after. Fields are laid over those of the file without the turn; ``engine_options`` are merged. ``refused``
instead of ``says``: the words of the refusal; ``config`` what a model's config that is made of the keys has then.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.errors import ConfigError, SetupError
from memplan.estimator import Estimate, estimate
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


STILL = frozenset({
    "alpha", "rslora", "dropout", "attn_implementation", "flash_attn", "attention",
    "flex_attention", "sdp_attention", "attn", "bucket", "broadcast_buffers", "static_graph",
    "prefetch", "all_gathers", "sync_module_states", "sub_group_size", "overlap",
    "softmax_fusion", "gelu_fusion", "dropout_fusion", "fp32", "loss_fusion", "divisible_by",
    "glu_activation", "kwargs", "dtype", "bf16", "recompute_modules", "exclude_modules",
    "audio_tower", "deployment.type", "config_file",
})  # fmt: skip
"""Words of keys whose turns move no byte: as many bytes another way, or a peak that lies elsewhere."""


@pytest.mark.fuzz
@pytest.mark.parametrize("stack", TURNED)
def test_turned_keys_move_the_answer(stack: str) -> None:
    """The bytes too, not the setup alone: what a setup says and nothing counts is found here."""
    turned, gpu = TURNED[stack], load_gpu("h100")

    def answer(found: StackSetup) -> Estimate:
        return estimate(load_model(found.model or "llama-3.2-1b"), found.setup, gpu)

    for key, turn in turned["keys"].items():
        name = key.partition(" ")[0]
        values = laid_over(turned["file"], turn.get("with", {}))
        given = {**turned.get("given", {}), **turn.get("given", {})}
        if "says" not in turn or any(word in name for word in STILL):
            continue
        reader = turned.get("stack", stack)
        before = read(values, reader, given)
        after = read(laid_over(values, {name: turn["to"]}), reader, given)
        if before.model != after.model:
            continue
        try:
            first, second = answer(before), answer(after)
        except SetupError:
            continue
        places = [
            (each.setup.num_gpus, each.setup.gradient_accumulation_steps)
            for each in (first, second)
        ]
        same = first.account == second.account and first.unmodelled == second.unmodelled
        assert not same or places[0] != places[1], key


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
