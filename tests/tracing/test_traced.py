"""Traced modules against built-in models of the same sizes: the tapes of Llama, GPT-2 and T5.

``tests/data/traced`` was written by ``memplan.trace`` from transformers 5.23's own classes, with torch 2.13.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.api import estimate
from memplan.errors import ConfigError, SetupError, UsageError
from memplan.model.spec import ModelSpec
from memplan.sources.about_models.tape_file import tape_text
from memplan.sources.models import load_model
from memplan.tracing import save_tape
from memplan.training.setup import TrainingSetup

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2,
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 256,
        "n_head": 4, "vocab_size": 1000, "n_positions": 1024,
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 256,
        "d_ff": 512, "num_layers": 2, "num_heads": 4, "d_kv": 64, "vocab_size": 1000,
    },
}  # fmt: skip
ALIKE: tuple[dict[str, Any], ...] = (
    {"precision": "bf16"},
    {"precision": "bf16", "checkpointing": "full", "micro_batch_size": 3},
    {"precision": "fp32", "micro_batch_size": 5},
    {"precision": "fp32", "checkpointing": "full"},
    {"precision": "bf16-amp", "checkpointing": "full"},
    {"engine": "fsdp", "num_gpus": 8},
    {"engine": "deepspeed", "zero_stage": 2, "num_gpus": 4, "precision": "bf16-master"},
)
DECODERS: tuple[dict[str, Any], ...] = (
    {"precision": "bf16-amp", "micro_batch_size": 2},
    {"engine": "ddp", "num_gpus": 8},
    {"precision": "bf16-autocast", "adapter": {"lora": {"rank": 8, "targets": "all-linear"}}},
    {"precision": "fp16-amp", "optimizer": "adafactor"},
)
CLOSE = 0.007
"""T5 under autocast without checkpointing: one fp32 tensor of the hidden size goes earlier than it should."""


def file_of(checkout: Path, name: str) -> Path:
    return checkout / "tests" / "data" / "traced" / f"{name}.tape.json"


@pytest.fixture(params=sorted(CONFIGS))
def pair(request: pytest.FixtureRequest, checkout: Path) -> tuple[ModelSpec, ModelSpec]:
    """A traced module and the built-in model."""
    return load_model(file_of(checkout, request.param)), load_model(CONFIGS[request.param])


def test_every_phase_is_the_built_in_model_s(pair: tuple[ModelSpec, ModelSpec]) -> None:
    """To the byte, in every phase's peak, on batches that were not traced."""
    traced, built = pair
    assert traced.num_params == built.num_params
    for fields in ALIKE + (DECODERS if built.family != "t5" else ()):
        setup = TrainingSetup(seq_len=192, **fields)
        found, known = (estimate(model, setup, gpu="a100-80gb") for model in pair)
        # Tables of positions that a module registers beside its weights: a tape does not have them.
        tables = known.phases["backward"].components.get("buffers", 0)
        assert tables in (0, 1024), fields
        # Position ids, which checkpoints of Llama's layers hold: that layers are handed any is in no tape of operations.
        held = 8 * setup.seq_len if built.family == "llama" and "checkpointing" in fields else 0
        beside = tables + held
        assert found.peak_bytes == known.peak_bytes - beside, fields
        assert found.held_bytes == known.held_bytes - tables, fields
        assert (
            found.phases["backward"].peak_bytes == known.phases["backward"].peak_bytes - beside
        ), fields


def test_t5_under_autocast(checkout: Path) -> None:
    setup = TrainingSetup(precision="bf16-amp", seq_len=256)  # type: ignore[arg-type]
    found = estimate(load_model(file_of(checkout, "t5")), setup).peak_bytes
    assert found == pytest.approx(estimate(load_model(CONFIGS["t5"]), setup).peak_bytes, rel=CLOSE)


def test_both_ledgers_agree(pair: tuple[ModelSpec, ModelSpec]) -> None:
    answer = estimate(pair[0], TrainingSetup(precision="bf16", seq_len=128), gpu="a100-80gb")  # type: ignore[arg-type]
    assert answer.run is not None
    assert answer.run.peaks.requested_bytes == answer.peak_bytes


def test_a_file_is_the_module(checkout: Path, tmp_path: Path) -> None:
    model = load_model(file_of(checkout, "gpt2"))
    save_tape(model, tmp_path / "again.tape.json")
    assert load_model(tmp_path / "again.tape.json").traced == model.traced
    assert json.loads(tape_text(model))["class_name"] == "GPT2LMHeadModel"
    assert any("GPT2LMHeadModel" in each for each in model.assumptions)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention": "flash"}, "kernels"),
        ({"engine": "fsdp", "num_gpus": 8, "tensor_parallel": 2}, "tensor_parallel"),
        ({"freeze": "embeddings"}, "freeze"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(
    checkout: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(SetupError, match=f"{named}: .* is a traced module"):
        _ = estimate(load_model(file_of(checkout, "llama")), TrainingSetup(**fields)).peak_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: 2 of a traced module is not known here"),
        ({"programs": {"full": {}}}, "no whole traced module"),
        ({"parameters": [["weight"]]}, "no whole traced module"),
    ],
)
def test_a_broken_file_is_refused(
    checkout: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    found = json.loads(file_of(checkout, "gpt2").read_text(encoding="utf-8")) | change
    path = tmp_path / "broken.tape.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_model(path)


def test_a_task_cannot_be_asked_of_it(checkout: Path) -> None:
    with pytest.raises(UsageError, match="a traced module is complete"):
        load_model(file_of(checkout, "gpt2"), task="masked-lm")


def test_a_built_in_model_is_no_tape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no traced module"):
        save_tape(load_model("gpt2"), tmp_path / "x.json")
