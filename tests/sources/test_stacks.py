"""Files of training stacks, and what the stacks do by default."""

from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.sources.setup_file import read_setup_file
from memplan.sources.stacks import STACKS, read_preset, read_stack, stack_of
from memplan.sources.stacks.keys import key_table
from memplan.sources.stacks.presets import load_preset, preset_names
from memplan.sources.trainer_keys import known_arguments
from memplan.training.precision import Engine, Precision
from memplan.training.setup import SETUP_FIELDS, Recomputation

CODE = Path(__file__).parent.parent.parent / "memplan" / "sources" / "stacks"
FIELDS = {
    *SETUP_FIELDS, "quantize", "optimizer_options", "packing", "job", "compile",
}  # fmt: skip
"""Fields that a default may name."""

AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.1-8B", "micro_batch_size": 2, "sequence_len": 4096,
    "bf16": True, "optimizer": "adamw_torch_fused", "gradient_checkpointing": True,
    "datasets": [{"path": "a", "type": "alpaca"}],
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "stage": "sft", "finetuning_type": "full",
    "template": "llama3", "bf16": True, "cutoff_len": 1024, "per_device_train_batch_size": 1,
}  # fmt: skip
TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "a", "max_length": 512,
}  # fmt: skip
EXAMPLES = {"axolotl": AXOLOTL, "llama_factory": FACTORY, "hf_trainer": TRL}


def read(values: dict[str, Any], **given: Any) -> Any:
    stack = stack_of(values)
    assert stack is not None
    return read_stack(values, stack, source="file.yaml", given=given)


# -- presets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_makes_a_setup_and_cites_what_it_set(name: str) -> None:
    preset = load_preset(name)
    found = read_preset(name)
    said = [note for note in found.notes if note.startswith(f"preset {name}: ")]
    assert said
    assert len({*said}) == len(said)
    for each in preset.defaults:
        assert each.field in FIELDS, each
        assert each.where
        assert each.key is None or each.key in {*key_table(preset.stack).known, *known_arguments()}


def test_what_is_given_beside_goes_first_and_is_not_said() -> None:
    found = read_preset("hf-trainer", {"micro_batch_size": 3, "engine": "fsdp"})
    assert found.setup.micro_batch_size == 3
    assert found.setup.chosen_engine is Engine.FSDP
    assert not any("per_device_train_batch_size" in note for note in found.notes)


def test_trl_loads_in_fp32_and_trains_under_autocast() -> None:
    setup = read_preset("trl-sft").setup
    assert setup.precision is Precision.BF16_AMP
    assert setup.checkpointing is Recomputation.FULL
    assert (setup.micro_batch_size, setup.seq_len) == (8, 1024)


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'trl-sft'"):
        read_preset("trl_sft")


# -- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
def test_no_key_is_in_two_places(stack: str) -> None:
    table = key_table(stack)
    names = [*table.own, *table.renamed]
    assert len(names) == len({*names}), sorted(name for name in names if names.count(name) > 1)


@pytest.mark.parametrize("stack", STACKS)
def test_every_key_that_is_read_is_in_the_reader(stack: str) -> None:
    code = (CODE / f"{stack}.py").read_text() + (CODE / "arguments.py").read_text()
    arguments = known_arguments()
    for key in key_table(stack).read:
        assert f'"{key}"' in code or key in arguments or f'"{key.rpartition(".")[2]}"' in code, key


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", EXAMPLES)
def test_a_file_is_known_by_its_keys(stack: str) -> None:
    assert stack_of(EXAMPLES[stack]) == stack


@pytest.mark.parametrize("stack", EXAMPLES)
def test_an_unknown_key_is_refused_with_the_nearest(stack: str) -> None:
    key = list(EXAMPLES[stack])[2]
    slipped = f"{key[:-1]}{key[-2]}x"
    with pytest.raises(ConfigError, match=rf"^file.yaml: {slipped}: .*Did you mean '{key}'"):
        read({**EXAMPLES[stack], slipped: 1})


@pytest.mark.parametrize("stack", EXAMPLES)
def test_keys_that_change_nothing_are_said(stack: str) -> None:
    found = read({**EXAMPLES[stack], "learning_rate": 1e-4})
    (line,) = [note for note in found.notes if note.startswith("do not change memory: ")]
    assert "learning_rate" in line


def test_axolotl() -> None:
    found = read({**AXOLOTL, "liger_rms_norm": True, "attn_implementation": "flash_attention_2"})
    assert found.model == "meta-llama/Llama-3.1-8B"
    setup = found.setup
    assert setup.precision is Precision.BF16_AUTOCAST
    assert (setup.micro_batch_size, setup.seq_len) == (2, 4096)
    assert setup.checkpointing is Recomputation.FULL
    assert setup.attention is not None
    assert setup.attention.value == "flash"
    assert setup.norm is not None


@pytest.mark.parametrize(
    ("value", "precision"),
    [
        ("auto", Precision.BF16_AUTOCAST),
        ("full", Precision.BF16),
        (False, Precision.FP32),
    ],
)
def test_axolotl_loads_in_the_dtype_that_it_computes_in(value: Any, precision: Precision) -> None:
    assert read({**AXOLOTL, "bf16": value}).setup.precision is precision


def test_axolotl_finds_the_deepspeed_file_that_it_brings_along() -> None:
    setup = read({**AXOLOTL, "deepspeed": "deepspeed_configs/zero3_bf16.json"}, num_gpus=8).setup
    assert setup.engine is Engine.DEEPSPEED
    assert setup.zero_stage is not None
    assert int(setup.zero_stage) == 3


def test_axolotl_under_fsdp2_casts_shards_to_fp32() -> None:
    config = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "offload_params": False,
              "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}  # fmt: skip
    values = {**AXOLOTL, "fsdp_version": 2, "fsdp_config": config}
    setup = read(values, num_gpus=8).setup
    assert setup.engine is Engine.FSDP
    assert setup.precision is Precision.BF16_MIXED


def test_llama_factory_trains_everything_in_fp32_under_autocast() -> None:
    found = read(FACTORY)
    assert found.setup.precision is Precision.BF16_AMP
    assert found.setup.checkpointing is Recomputation.FULL
    assert found.setup.seq_len == 1024
    assert read({**FACTORY, "pure_bf16": True, "bf16": False}).setup.precision is Precision.BF16


def test_a_trl_file_says_how_the_model_is_loaded() -> None:
    found = read({**TRL, "dtype": "bfloat16"})
    assert found.model == "Qwen/Qwen2.5-7B"
    assert found.setup.precision is Precision.BF16_AUTOCAST
    assert found.setup.seq_len == 512


def test_a_trl_file_belongs_to_the_trainer_that_has_its_keys() -> None:
    found = read({**TRL, "precompute_ref_log_probs": True})
    assert any("DPOConfig" in note for note in found.notes)


def test_references_between_keys_are_filled_in() -> None:
    found = read({**AXOLOTL, "sequence_len": "${micro_batch_size}"})
    assert found.setup.seq_len == 2


def test_what_is_filled_in_when_the_job_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^file.yaml: base_model: .*write its value"):
        read({**AXOLOTL, "base_model": "${oc.env:MODEL}"})


def test_a_wrong_value_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^file.yaml: micro_batch_size: write a whole number"):
        read({**AXOLOTL, "micro_batch_size": "two"})


# -- a setup's own file --------------------------------------------------------------------------


def test_a_setup_file_names_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("preset: trl-sft\nnum_gpus: 4\nmicro_batch_size: 1\n")
    found = read_setup_file(path)
    assert (found.setup.num_gpus, found.setup.micro_batch_size, found.setup.seq_len) == (4, 1, 1024)
    assert any(note.startswith("preset trl-sft: ") for note in found.notes)


def test_half_of_a_setup_is_named_for_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {}\n")
    with pytest.raises(ConfigError, match="give it as --accelerate-config"):
        read_setup_file(path)


def test_a_slip_in_a_setup_of_memplans_own_is_still_one(tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("num_gpus: 4\nmicro_batch_sice: 1\n")
    with pytest.raises(ConfigError, match="Did you mean 'micro_batch_size'"):
        read_setup_file(path)
