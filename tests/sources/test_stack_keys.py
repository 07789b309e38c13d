"""The tables of keys hold every key that a stack declares, and a key that is read moves what it says it does.

``tests/data/stack_keys/STACK.json``: the keys of the newest version looked at, as ``benchmarks/stack_keys.py`` found them.
``tests/data/turned_keys/STACK.yaml``, DeepSpeed's and accelerate's files too: a whole file (``file``, read with the options ``given`` beside it), and for each key
that is read the value it is turned ``to``, and the fields of a setup that ``says`` the same. ``with`` are other keys that
the file has before and after. Fields are laid over those of the file without the turn; ``engine_options`` are merged. ``refused``
instead of ``says``: the words of the refusal; ``quiet`` are keys that change nothing; ``config`` what a model's config that is made of the keys has then.
"""

import json
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError, SetupError, UnsupportedOperationError
from memplan.estimator import Estimate, estimate
from memplan.estimator.time.step_time import step_time
from memplan.sources import accelerate_config
from memplan.sources.accelerate_config import accelerate_fields
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.deepspeed_config import deepspeed_fields
from memplan.sources.deepspeed_keys import OPTIMIZER_PARAMS, TOP, Key, Section
from memplan.sources.job_models import looked_up
from memplan.sources.key_tables import Fate, key_table
from memplan.sources.models import load_model
from memplan.sources.stacks import StackSetup, read_stack
from memplan.training.setup import TrainingSetup
from tests.yaml_files import read_yaml

DATA = Path(__file__).parent.parent / "data"
DECLARED = sorted(path.stem for path in (DATA / "stack_keys").glob("*.json"))
TURNED = {path.stem: read_yaml(path) for path in sorted((DATA / "turned_keys").glob("*.yaml"))}


@pytest.mark.parametrize("stack", DECLARED)
def test_every_key_of_the_newest_version_is_sorted(stack: str) -> None:
    text = (DATA / "stack_keys" / f"{stack}.json").read_text(encoding="utf-8")
    table = key_table(stack)
    names = [name for keys in json.loads(text)["keys"].values() for name in keys]
    assert names
    assert [name for name in names if table.fate(name)[1] is None] == []


ENGINES = ("accelerate", "deepspeed")
"""Whose files have no table: their readers say which keys there are."""


@pytest.mark.parametrize("stack", sorted(TURNED.keys() - ENGINES))
def test_every_key_that_is_read_is_turned(stack: str) -> None:
    turned = {each.partition(" ")[0] for each in TURNED[stack]["keys"]}
    assert {*key_table(TURNED[stack].get("table", stack)).read} - turned == set()


def keys_of(section: Section, place: str = "") -> list[str]:
    """Every key of a ``ds_config.json`` that holds a value."""
    found: list[str] = []
    for name, each in section.items():
        found += [place + name] if isinstance(each, Key) else keys_of(each, f"{place}{name}.")
    return found


def keys_of_engine(stack: str) -> set[str]:
    """Every key that a reader knows."""
    if stack == "deepspeed":
        return {*keys_of(TOP), *(f"optimizer.params.{name}" for name in OPTIMIZER_PARAMS)} - {
            "optimizer.params"
        }
    of = accelerate_config
    plain = of._IGNORED - {
        f"{name}_config" for name in ("fsdp", "parallelism", "dynamo", "deepspeed", "fp8")
    }
    return {
        *plain, *of._REFUSED, *(f"fsdp_config.fsdp_{name}" for name in of._FSDP_KEYS),
        *(f"deepspeed_config.{name}" for name in (*of._DEEPSPEED_KEYS, *of._DEEPSPEED_LAUNCH_KEYS)),
        *(f"parallelism_config.parallelism_config_{name}" for name in of._PARALLEL_KEYS),
        *(f"fp8_config.fp8_{name}" for name in of._FP8_KEYS),
    }  # fmt: skip


@pytest.mark.parametrize("stack", ENGINES)
def test_every_key_of_an_engines_file_is_turned_or_changes_nothing(stack: str) -> None:
    named = {*TURNED[stack]["keys"], *TURNED[stack]["quiet"]}
    whole = tuple(f"{name}." for name in named)
    under = {name.partition(".")[0] for name in named}
    assert {
        key
        for key in keys_of_engine(stack)
        if key not in named and key not in under and not key.startswith(whole)
    } == set()


@pytest.mark.parametrize("stack", ENGINES)
def test_quiet_keys_of_an_engines_file_change_nothing(stack: str) -> None:
    turned = TURNED[stack]
    kinds = {**dict.fromkeys(turned["quiet"], 1)}
    plain = read(turned["file"], stack, turned["given"]).setup
    for key in kinds:
        with suppress(ConfigError):  # 1 is no value of some
            assert (
                read(laid_over(turned["file"], {key: 1}), stack, turned["given"]).setup == plain
            ), key


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
        "mixed_precision", "bf16", "dtype", "param_dtype", "autocast_dtype", "sdp_attention", "flex_attention",
    }),
    "what the file at hand lets make no difference: its card, model, parts or sizes": frozenset({
        "gradient_checkpointing_kwargs", "ddp_broadcast_buffers", "ddp_static_graph", "limit_all_gathers",
        "sync_module_states", "allgather_bucket_size", "sub_group_size", "type", "exclude_modules",
        "fake_balanced_gate", "freeze_audio_tower", "recompute_modules", "ddp_pad_buckets_for_high_nccl_busbw",
        "buffer_count", "max_in_cpu", "pin_memory", "model_persistence_threshold", "stage3_model_persistence_threshold",
        "use_multi_rank_bucket_allreduce", "allgather_partitions", "elastic_checkpoint", "load_from_fp32_weights",
        "immediate_grad_update", "bf16_optimizer_states", "grad_accum_dtype", "parameter_alignment", "memory_efficient_linear",
        "attention_softmax_in_fp32", "cross_entropy_loss_fusion", "no_masked_softmax_fusion", "no_bias_gelu_fusion",
        "no_bias_dropout_fusion", "make_vocab_size_divisible_by", "masked_softmax_fusion", "bias_dropout_fusion",
        "recompute_method",
    }),
    "checks and hooks of DeepSpeed's": frozenset({
        "ignore_unused_parameters", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
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
    if first.host_bytes != second.host_bytes:
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
    if stack not in ENGINES:
        return read_stack(values, stack, source="file.yaml", given=given)
    found = (
        deepspeed_fields(values, given, source="file.json")
        if stack == "deepspeed"
        else accelerate_fields(values, given, source="file.yaml", folder=Path())
    )
    setup = TrainingSetup(**{**given, **found.fields})
    return StackSetup(setup=setup, model=None, notes=found.notes)


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
