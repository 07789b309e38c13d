"""Files of training stacks, and what the stacks do by default."""

import json
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.errors import ConfigError
from memplan.sources.key_tables import key_table
from memplan.sources.setup_file import read_setup_file
from memplan.sources.stacks import STACKS, read_preset, read_stack, stack_of
from memplan.sources.stacks.presets import load_preset, preset_names
from memplan.sources.trainer.keys import known_arguments
from memplan.sources.trainer.launch import EngineFile, Launch
from memplan.training.choices import Recomputation
from memplan.training.precision import Engine, Precision
from memplan.training.setup import SETUP_FIELDS

CODE = Path(__file__).parent.parent.parent / "memplan" / "sources" / "stacks"
FIELDS = {
    *SETUP_FIELDS, "quantization", "optimizer_options", "optimizer_in_backward",
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
TORCHTUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_rank": 8,
              "lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True},
    "batch_size": 2, "enable_activation_checkpointing": True, "dtype": "bf16",
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 4096},
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True},
}  # fmt: skip
TORCHTITAN: dict[str, Any] = {
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"local_batch_size": 1, "seq_len": 8192, "steps": 10},
    "activation_checkpoint": {"mode": "full"},
}  # fmt: skip
NEMO: dict[str, Any] = {
    "step_scheduler": {"local_batch_size": 2, "global_batch_size": 16},
    "model": {"pretrained_model_name_or_path": "meta-llama/Llama-3.2-1B", "torch_dtype": "bf16"},
    "distributed": {"strategy": "fsdp2", "activation_checkpointing": True},
    "dataset": {"seq_length": 2048},
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-5},
}  # fmt: skip
PRIME: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-8B"}, "orchestrator": {"batch_size": 128}, "seq_len": 4096,
    "deployment": {"num_train_gpus": 4, "num_infer_gpus": 4}, "trainer": {"optim": {"lr": 1e-6}},
}  # fmt: skip
VERL: dict[str, Any] = {
    "data": {"max_prompt_length": 1024, "max_response_length": 3072},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-7B", "lora_rank": 0},
        "actor": {"ppo_micro_batch_size_per_gpu": 2, "strategy": "fsdp2", "use_kl_loss": True},
        "rollout": {"name": "vllm", "gpu_memory_utilization": 0.6},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "trainer": {"n_gpus_per_node": 8, "nnodes": 2},
}  # fmt: skip
LIGHTNING: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {"precision": "bf16-mixed", "devices": 4, "accumulate_grad_batches": 2},
    "model": {"class_path": "mine.Model", "init_args": {"model_name_or_path": "openai-community/gpt2"}},
    "data": {"class_path": "mine.Data", "init_args": {"batch_size": 3}},
}  # fmt: skip
LITGPT: dict[str, Any] = {
    "checkpoint_dir": "checkpoints/meta-llama/Meta-Llama-3-8B", "out_dir": "out", "precision": "bf16-true",
    "quantize": "bnb.nf4", "devices": 1, "lora_r": 32, "lora_query": True, "lora_value": True,
    "train": {"global_batch_size": 8, "micro_batch_size": 2, "max_seq_length": 512},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4}},
}  # fmt: skip
NANOTRON: dict[str, Any] = {
    "general": {"project": "a"},
    "model": {"dtype": "bfloat16", "model_config": {
        "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "tie_word_embeddings": True,
        "vocab_size": 49152, "max_position_embeddings": 2048}},
    "optimizer": {"accumulate_grad_in_fp32": True, "zero_stage": 0,
                  "optimizer_factory": {"name": "adamW", "torch_adam_is_fused": True}},
    "parallelism": {"dp": 4, "tp": 2, "pp": 1, "tp_mode": "REDUCE_SCATTER"},
    "tokens": {"micro_batch_size": 8, "sequence_length": 2048, "batch_accumulation_per_replica": 2},
}  # fmt: skip
FACTORY_V1: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B", "model_class": "llm", "dist_config": {"name": "fsdp2"},
    "train_dataset": "a.yaml", "micro_batch_size": 2, "cutoff_len": 1024,
}  # fmt: skip
UNSLOTH: dict[str, Any] = {
    "model": "unsloth/Llama-3.2-1B-Instruct", "data": {"dataset": "a"},
    "training": {"max_seq_length": 1024, "batch_size": 1}, "lora": {"lora_r": 16},
}  # fmt: skip
EXAMPLES = {
    "unsloth": UNSLOTH,
    "litgpt": LITGPT, "nanotron": NANOTRON, "llama_factory_v1": FACTORY_V1,
    "axolotl": AXOLOTL, "llama_factory": FACTORY, "hf_trainer": TRL, "torchtune": TORCHTUNE,
    "torchtitan": TORCHTITAN, "nemo": NEMO, "prime_rl": PRIME, "verl": VERL, "lightning": LIGHTNING,
}  # fmt: skip
SLIPS = {
    "unsloth": "training.max_seq_length",
    "litgpt": "train.micro_batch_size", "nanotron": "tokens.sequence_length",
    "llama_factory_v1": "batching_strategy",
    "axolotl": "sequence_len", "llama_factory": "finetuning_type", "hf_trainer": "dataset_name",
    "torchtune": "gradient_accumulation_steps", "torchtitan": "training.seq_len",
    "nemo": "distributed.strategy", "prime_rl": "deployment.num_train_gpus",
    "verl": "actor_rollout_ref.actor.strategy", "lightning": "trainer.precision",
}  # fmt: skip
"""A key of each stack's."""


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
        assert each.key is None or each.key in key_table(preset.stack).known


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


@pytest.mark.parametrize("stack", [*STACKS, "training_arguments"])
def test_no_key_is_in_two_places(stack: str) -> None:
    table = key_table(stack)
    names = [
        *table.read, *table.quiet, *table.left_out, *table.upper, *table.refused,
        *(name for name in table.renamed if stack != "training_arguments"),
    ]  # fmt: skip
    assert len(names) == len({*names}), sorted(name for name in names if names.count(name) > 1)


@pytest.mark.parametrize("stack", STACKS)
def test_every_key_that_is_read_is_in_the_reader(stack: str) -> None:
    code = (CODE / "arguments.py").read_text()
    parts = [*CODE.glob(f"{stack}*.py"), *CODE.glob(f"of_{stack}/*.py")]
    code += "".join(path.read_text() for path in parts)
    arguments = known_arguments()
    for key in key_table(stack).read:
        last = key.rpartition(".")[2]
        assert key in arguments or any(f'{before}{last}"' in code for before in ('"', ".")), key


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", EXAMPLES)
def test_a_file_is_known_by_its_keys(stack: str) -> None:
    assert stack_of(EXAMPLES[stack]) == stack


@pytest.mark.parametrize("stack", EXAMPLES)
def test_an_unknown_key_is_refused_with_the_nearest(stack: str) -> None:
    key = SLIPS[stack]
    slipped = f"{key[:-1]}{key[-2]}x"
    with pytest.raises(ConfigError, match=rf"^file.yaml: {slipped}: .*Did you mean '{key}'"):
        read({**EXAMPLES[stack], slipped: 1})


@pytest.mark.parametrize(
    ("stack", "key"),
    [("axolotl", "learning_rate"), ("llama_factory", "learning_rate"), ("hf_trainer", "seed"),
     ("torchtune", "epochs"), ("torchtitan", "metrics.log_freq"), ("nemo", "wandb.project"),
     ("prime_rl", "max_steps"), ("verl", "trainer.logger"), ("lightning", "trainer.max_epochs")],
)  # fmt: skip
def test_keys_that_change_nothing_are_said(stack: str, key: str) -> None:
    found = read({**EXAMPLES[stack], key: 1})
    (line,) = [note for note in found.notes if note.startswith("do not change memory: ")]
    assert key in line


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


@pytest.mark.parametrize(
    ("values", "tiles"),
    [
        pytest.param({"tiled_mlp_num_shards": 6}, 6, id="given"),
        pytest.param({"sequence_len": 131072}, 4, id="of 32768 tokens"),
    ],
)
def test_axolotl_tiles_its_networks(values: dict[str, Any], tiles: int) -> None:
    assert read({**AXOLOTL, "tiled_mlp": True, **values}).setup.mlp_tiles == tiles


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


def test_llama_factorys_mcore_trainer_trains_all_weights_whatever_is_asked_for() -> None:
    """As the same file with ``full`` and the options that say it; ROLL's ``use_mca: false`` is no Megatron at all."""
    split = {**FACTORY, "tensor_model_parallel_size": 2}
    whole = read(split)
    adapted = {**split, "finetuning_type": "lora", "lora_rank": 8}
    named = read(adapted)
    assert named.setup == whole.setup
    assert named.setup.adapter is None
    new = {*named.notes} - {*whole.notes}
    assert "do nothing here: lora_rank" in new
    assert any("mcore_adapter makes no adapters and freezes no layers" in note for note in new)
    del adapted["finetuning_type"]
    assert read(adapted).setup == whole.setup
    assert read({**split, "use_mca": False}).setup.engine != whole.setup.engine
    with pytest.raises(ConfigError, match="frozen layers under Megatron are not modelled"):
        read({**split, "freeze_language_model": True})


def test_a_trl_file_says_how_the_model_is_loaded() -> None:
    found = read({**TRL, "dtype": "bfloat16"})
    assert found.model == "Qwen/Qwen2.5-7B"
    assert found.setup.precision is Precision.BF16_AUTOCAST
    assert found.setup.seq_len == 512


def test_a_trl_file_belongs_to_the_trainer_that_has_its_keys() -> None:
    found = read({**TRL, "precompute_ref_log_probs": True})
    assert found.setup.job.kind.value == "dpo"


def test_torchtune() -> None:
    found = read(TORCHTUNE, num_gpus=8)
    assert found.model == "llama-3.1-8b"
    setup = found.setup
    assert (setup.chosen_engine, setup.precision) == (Engine.FSDP, Precision.BF16)
    assert (setup.micro_batch_size, setup.seq_len) == (2, 4096)
    assert "q_proj, o_proj, gate_proj, up_proj, down_proj" in str(setup.adapter)
    assert read(TORCHTUNE).setup.chosen_engine is Engine.DDP
    full = read({**TORCHTUNE, "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}})
    assert full.setup.adapter is None
    assert not any("model.lora" in note for note in full.notes)


def test_torchtitan() -> None:
    found = read(TORCHTITAN, num_gpus=8)
    assert found.model == "llama-3.1-8b"
    setup = found.setup
    assert (setup.engine, setup.precision) == (Engine.FSDP, Precision.BF16_MIXED)
    assert (setup.micro_batch_size, setup.seq_len) == (1, 8192)
    assert setup.checkpointing is Recomputation.FULL
    assert dict(setup.engine_options)["wrapping"] == "torchtitan"


def test_torchtitan_shares_a_global_batch_out() -> None:
    values = {**TORCHTITAN, "training.global_batch_size": 32}
    assert read(values, num_gpus=8).setup.gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match="global_batch_size: 32 sequences are no whole number"):
        read(values, num_gpus=6)


@pytest.mark.parametrize(
    ("degrees", "count"),
    [
        ({}, 8), ({"tensor_parallel_degree": 4}, 8), ({"tensor_parallel_degree": 16}, 16),
        ({"tensor_parallel_degree": 4, "data_parallel_shard_degree": 1}, 4), ({"data_parallel_shard_degree": 1}, 1),
    ],
)  # fmt: skip
def test_torchtitan_runs_on_what_its_launcher_starts(degrees: dict[str, int], count: int) -> None:
    """``run_train.sh``: ``NGPU=${NGPU:-"8"}``; where all degrees are said, their product has to be the GPUs (``ParallelDims``)."""
    found = read({**TORCHTITAN, **{f"parallelism.{name}": each for name, each in degrees.items()}})
    assert found.setup.num_gpus == count
    words = "1 GPU," if count == 1 else f"{count} GPUs, as its degrees"
    assert any(note.startswith(words) for note in found.notes)
    assert read(TORCHTITAN, num_gpus=2).setup.num_gpus == 2


def test_torchtune_takes_log_probabilities_of_fp32_logits() -> None:
    assert "norm" in str(read(TORCHTUNE).notes)
    gemma = {**TORCHTUNE, "model": {"_component_": "torchtune.models.gemma2.gemma2_2b"}}
    found = read(gemma)
    assert (found.setup.norm, any("norm fused" in each for each in found.notes)) == (None, False)
    dpo = read({**TORCHTUNE, "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}})
    assert dpo.setup.job.log_probabilities.value == "whole"


def test_nemo() -> None:
    found = read(NEMO, num_gpus=2)
    assert found.model == "meta-llama/Llama-3.2-1B"
    setup = found.setup
    assert (setup.engine, setup.precision) == (Engine.FSDP, Precision.BF16)
    assert (setup.micro_batch_size, setup.gradient_accumulation_steps) == (2, 4)
    with pytest.raises(ConfigError, match="Megatron models are not modelled"):
        read({"trainer": {"devices": 8}, "model": {"micro_batch_size": 4}})


def test_nemo_shards_nothing_on_one_gpu() -> None:
    """``fsdp2_sharding_enabled``; where the file says nothing of GPUs, its launcher takes all of a node."""
    file = {**NEMO, "distributed": {"strategy": "fsdp2"}}
    alone, node = read(file, num_gpus=1), read(file)
    assert alone.setup.engine is Engine.DDP
    assert (node.setup.engine, node.setup.num_gpus) == (Engine.FSDP, 8)
    assert any("8 GPUs, a node's" in note for note in node.notes)


def test_torchtunes_files_run_the_recipe_of_its_registry() -> None:
    dpo = {**TORCHTUNE, "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}
    full = {**dpo, "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}}
    for values, source, gpus in (
        (TORCHTUNE, "recipes/configs/llama3_1/8B_lora.yaml", 8),
        (TORCHTUNE, "recipes/configs/llama3_1/8B_lora_single_device.yaml", 1),
        (TORCHTUNE, "mine.yaml", 1),
        (dpo, "mine.yaml", 1),
        (full, "mine.yaml", 8),
    ):
        assert read_stack(values, "torchtune", source=source).setup.num_gpus == gpus


def test_torchtitans_experts_are_narrow_where_a_converter_says_so() -> None:
    experts = {"quantize": {"grouped_mm": {"float8": {"fqns": ["experts"]}}}}
    idle = read({**TORCHTITAN, **experts}).setup
    model = {**TORCHTITAN["model"], "converters": ["quantize.grouped_mm.float8"]}
    asked = read({**TORCHTITAN, **experts, "model": model}).setup
    assert idle.left_out == ()
    assert asked.left_out == ("quantize.grouped_mm (experts in 8 bits)",)
    assert asked.fp8.value == "none"


def test_axolotls_packed_rows_are_one_sequence_to_its_ring() -> None:
    ring = {**AXOLOTL, "context_parallel_size": 2, "attn_implementation": "flash_attention_2"}
    found = read(
        {**ring, "sample_packing": True, "fsdp_version": 2, "fsdp": ["full_shard"]}, num_gpus=2
    )
    assert (found.setup.packing.value, found.setup.attention) == ("none", None)
    assert any("ring-flash-attn" in each for each in found.setup.left_out)
    found = read(
        {
            **ring,
            "sample_packing": True,
            "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        },
        num_gpus=2,
    )
    shared = found.setup.sequences_shared
    assert (found.setup.engine.value, shared.kind.value) == ("deepspeed", "ring")
    assert any("ring-flash-attn" in each for each in found.setup.left_out)


def test_prime_rl_counts_the_trainers_gpus() -> None:
    found = read(PRIME)
    assert found.model == "Qwen/Qwen3-8B"
    assert (found.setup.num_gpus, found.setup.seq_len) == (4, 4096)
    assert found.setup.precision is Precision.BF16_MIXED


def test_prime_rl_trains_short_rows_where_no_data_are_named() -> None:
    """``SFTDataConfig``; a length of the model's own is of ``rl``'s trainer, whose rows come from an orchestrator."""
    named, launched = {"name": "Qwen/Qwen3-8B"}, {"deployment": {"num_train_gpus": 4}}
    assert read({"model": named, **launched}).setup.seq_len == 128
    assert read({"model": {**named, "seq_len": 1024}, **launched}).setup.seq_len == 1024


def test_prime_rls_adapters_have_their_base_layers_format() -> None:
    model = {**PRIME["model"], "lora": {"rank": 8}} if "model" in PRIME else {"lora": {"rank": 8}}
    for dtype, said in (("bfloat16", "bf16"), ("float32", "fp32")):
        found = read({**PRIME, "model": {**model, "optimization_dtype": dtype}}).setup
        assert found.adapter is not None
        assert found.adapter.dtype.value == said


def test_verl() -> None:
    found = read(VERL)
    assert found.model == "Qwen/Qwen2.5-7B"
    setup = found.setup
    assert (setup.num_gpus, setup.nodes, setup.engine) == (16, 2, Engine.FSDP)
    assert (setup.micro_batch_size, setup.seq_len) == (2, 4096)


VERL_SCRIPT = """
set -x
length=$((1024 * 2))
both=$(((length + 1024) * 2))
MODEL=${MODEL:-${DATA:-${HOME}/models}/Qwen2.5-7B}
EXTRA="
    --unused"
COMMON=(
    actor_rollout_ref.model.path="${MODEL}"
    data.max_prompt_length=${length} data.max_response_length=1024
)
NCCL_DEBUG=INFO LEVEL=1 python3 -m verl.trainer.main_ppo --config-name='own_trainer' "${COMMON[@]}" \\
    algorithm.adv_estimator=grpo trainer.nnodes=2 custom_reward_function.path=recipe/reward.py \\
    # trainer.n_gpus_per_node=2 \\
    +actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$both $@
rm -f reward.py
python3 -m verl.trainer.main_ppo trainer.nnodes=4 trainer.n_gpus_per_node=1
"""


def test_verl_scripts_lay_words_over_the_configuration_they_name(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own_trainer.yaml").write_text(
        "trainer: {n_gpus_per_node: 4, nnodes: 1}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("python get.py\n" + VERL_SCRIPT)
    found = read_setup_file(script)
    assert not any("a program of its own" in note for note in found.notes)
    assert found.model == "qwen2.5-7b"
    setup = found.setup
    assert (setup.num_gpus, setup.nodes) == (8, 2)
    assert (setup.micro_batch_size, setup.seq_len) == (2, 3072)


VERL_SFT: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen2.5-0.5B", "enable_gradient_checkpointing": True},
    "engine": {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 2}, "optim": {"lr": 1e-5},
    "data": {
        "train_files": "a", "train_batch_size": 64, "max_length": 1024, "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
    },
}  # fmt: skip


def test_verl_s_trainer_over_engines_has_the_actor_s_keys_in_sections_of_its_own() -> None:
    found = read(VERL_SFT)
    setup = found.setup
    assert (setup.chosen_engine, setup.context_parallel, setup.num_gpus) == (Engine.FSDP, 2, 8)
    assert (setup.seq_len, setup.micro_batch_size, setup.gradient_accumulation_steps) == (
        1024,
        2,
        8,
    )
    assert not setup.job.generates
    by_tokens = read({**VERL_SFT, "data": {"train_files": "a", "max_token_len_per_gpu": 2048}})
    assert by_tokens.setup.micro_batch_size == 4
    with pytest.raises(ConfigError, match="engine: 'megatron' is not modelled"):
        read({**VERL_SFT, "engine": "megatron"})


def test_verl_counts_one_node_where_a_scheduler_says_how_many() -> None:
    found = read({**VERL, "trainer": {"n_gpus_per_node": 4, "nnodes": "${NODES}"}})
    assert found.setup.num_gpus == 4
    assert any("trainer.nnodes: its scheduler says" in note for note in found.notes)


def test_words_of_one_name_are_read_in_verl_scripts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "bits=8\ntorchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=gpt2 \\\n"
        " data.max_length=512 ulysses_sequence_parallel_size=2 use_remove_padding=true\n"
    )
    setup = read_setup_file(script).setup
    assert (setup.context_parallel, setup.packing.value) == (2, "padding_free")


def test_a_script_s_flags_lie_over_the_configuration_it_runs(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler: {global_batch_size: 64, local_batch_size: 4}\n"
        "model: {pretrained_model_name_or_path: gpt2}\ndistributed: {strategy: fsdp2}\ndataset: {seq_length: 512}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "OFFLINE=1 python -m torch.distributed.run --nproc_per_node=2 --nnodes=1 -m coverage run \\\n"
        " finetune.py --config own.yaml --step_scheduler.local_batch_size 8 --dataset.seq_length=256\n"
    )
    setup = read_setup_file(script).setup
    assert (setup.num_gpus, setup.micro_batch_size, setup.seq_len) == (2, 8, 256)
    assert setup.gradient_accumulation_steps == 4
    script.write_text("torchrun --nproc_per_node=6 finetune.py --config own.yaml\n")
    assert any("NeMo AutoModel stops at it" in note for note in read_setup_file(script).notes)
    script.write_text("python finetune.py --config elsewhere.yaml\n")
    with pytest.raises(ConfigError, match=r"runs elsewhere\.yaml, which is neither"):
        read_setup_file(script)


def test_a_flag_without_a_value_is_no_model(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --bf16 --model_name_or_path\n")
    with pytest.raises(ConfigError, match="write a model's name or path"):
        read_setup_file(script)
    script.write_text("python convert.py --model_name_or_path gpt2 --output_dir out\n")
    with pytest.raises(ConfigError, match="no such setting"):
        read_setup_file(script)


@pytest.mark.parametrize("text", ["", "for n in 1 2; do bash run.sh $n; done\n"])
def test_a_script_that_says_nothing_is_no_setup_of_defaults(tmp_path: Path, text: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ConfigError, match="runs nothing with flags"):
        read_setup_file(script)


def test_a_configuration_that_a_script_names_and_nobody_has_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo --config-name own trainer.nnodes=1 actor_rollout_ref.a=1\n"
    )
    with pytest.raises(ConfigError, match="'own' is not beside the file"):
        read_setup_file(script)


def test_a_script_s_configuration_is_where_it_says_of_a_folder_above(tmp_path: Path) -> None:
    for folder, nodes in (("examples/config", 2), ("config", 4)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "own.yaml").write_text(
            f"trainer: {{n_gpus_per_node: 8, nnodes: {nodes}}}\n"
        )
    script = tmp_path / "tests" / "e2e" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text(
        'HERE="$(pwd)"\npython -m verl.trainer.main_ppo --config-path="$HERE/examples/config" --config-name own '
        "trainer.n_gpus_per_node=4 actor_rollout_ref.model.path=gpt2\n"
    )
    assert read_setup_file(script).setup.num_gpus == 8


def test_a_task_of_skypilot_is_the_script_that_it_runs(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own.yaml").write_text("actor_rollout_ref: {model: {path: gpt2}}\n")
    task = tmp_path / "examples" / "task.yaml"
    task.parent.mkdir()
    task.write_text(
        "resources: {accelerators: 'H100:4'}\nnum_nodes: 2\nenvs: {PLACE: clone/config}\nrun: |\n"
        "  GPUS=$SKYPILOT_NUM_GPUS_PER_NODE\n"
        '  python -m verl.trainer.main_ppo --config-path="$(pwd)/$PLACE" --config-name own \\\n'
        "    trainer.n_gpus_per_node=$GPUS trainer.nnodes=$SKYPILOT_NUM_NODES\n"
    )
    found = read_setup_file(task)
    assert (found.model, found.setup.num_gpus, found.setup.nodes) == ("gpt2", 8, 2)


def test_verl_has_as_many_micro_batches_as_interleaved_stages_run_in_rounds() -> None:
    actor = {
        "strategy": "megatron", "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 4096, "ppo_mini_batch_size": 100,
        "megatron": {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
    }  # fmt: skip
    steps = []
    for chunks in (2, None):
        actor["megatron"]["virtual_pipeline_model_parallel_size"] = chunks  # type: ignore[index]
        values = {**VERL, "actor_rollout_ref": {"model": {"path": "gpt2"}, "actor": actor}}
        steps.append(read(values).setup.gradient_accumulation_steps)
    assert steps[0] == steps[1] + -steps[1] % 4 != steps[1]


def test_verl_counts_micro_batches_by_tokens() -> None:
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16384, "strategy": "fsdp"}
    values = {**VERL, "actor_rollout_ref": {"model": {"path": "gpt2"}, "actor": actor}}
    setup = read(values).setup
    assert (setup.micro_batch_size, setup.engine) == (4, Engine.FSDP1)
    assert setup.job is not None
    assert (
        setup.job.scoring_batch_size is None
    )  # log-probabilities come in micro-batches of the same size


def test_verl_fills_a_micro_batch_with_no_more_than_the_mini_batch() -> None:
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 65536, "ppo_mini_batch_size": 32}
    setup = read({**VERL, "actor_rollout_ref": {"model": {"path": "gpt2"}, "actor": actor}}).setup
    assert (setup.micro_batch_size, setup.seq_len) == (2, 4096)
    assert setup.job is not None
    assert setup.job.scoring_batch_size == 16  # of all that was generated


def test_verl_trains_an_adapter_that_it_loads() -> None:
    """Its rank stands in its own file (verl, workers/fsdp_workers.py, ``lora_adapter_path``)."""
    model = {"path": "gpt2", "lora_adapter_path": "an/adapter"}
    found = read({**VERL, "actor_rollout_ref": {"model": model, "actor": {"strategy": "fsdp2"}}})
    assert found.setup.adapter is not None
    assert found.setup.adapter.rank == 16
    assert any("lora_adapter_path" in note for note in found.notes)


def test_verl_says_where_it_would_stop() -> None:
    actor = {"ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 8, "strategy": "fsdp"}
    found = read({**VERL, "actor_rollout_ref": {"model": {"path": "gpt2"}, "actor": actor}})
    assert any("the 2 sequences of a GPU" in note for note in found.notes)


def test_torchtune_s_distributed_recipes_run_on_a_node() -> None:
    values = {
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "batch_size": 1, "dtype": "bf16",
        "fsdp_cpu_offload": True,
    }  # fmt: skip
    found = read(values)
    setup = found.setup
    assert (setup.num_gpus, setup.engine, setup.offload_param.value) == (8, Engine.FSDP, "cpu")
    assert any("of a distributed recipe" in note for note in found.notes)
    found = read({**values, "custom_sharded_layers": ["tok_embeddings"]})
    assert any("as in the root's unit" in note for note in found.notes)


def test_torchtune_says_that_a_recipe_is_not_in_its_file() -> None:
    values = {
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "batch_size": 1, "dtype": "bf16",
    }  # fmt: skip
    assert any("on tune's command line" in note for note in read(values).notes)
    assert not any("on tune's command line" in note for note in read(values, num_gpus=2).notes)
    selective = read({**values, "ac_mode": "selective", "ac_option": 2}).setup
    assert (selective.num_gpus, selective.checkpointing) == (8, 0.5)


def test_nemo_reads_a_model_by_the_sizes_of_its_configuration() -> None:
    config = {
        "_target_": "transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig",
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
        "num_experts": 4, "vocab_size": 1024,
    }  # fmt: skip
    found = read({**NEMO, "model": {"config": config}})
    assert found.model["model_type"] == "qwen3_moe"
    assert found.model["num_experts"] == 4
    assert not any("num_experts" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [("Qwen/Qwen3-30B-A3B", ["*"], True), ("Qwen/Qwen3-30B-A3B", ["*_proj"], False),
     ("Qwen/Qwen3-8B", ["*"], False)],
)  # fmt: skip
def test_nemo_s_adapters_of_experts_are_named(model: str, targets: list[str], said: bool) -> None:
    found = read(
        {
            **NEMO,
            "model": {"pretrained_model_name_or_path": model},
            "peft": {"target_modules": targets},
        }
    )
    assert any("adapters of experts" in each for each in found.setup.left_out) is said


def test_nemo_says_that_embeddings_are_frozen_by_older_versions_alone() -> None:
    frozen = {"freeze_embeddings": True, "freeze_vision_tower": False}
    found = read({**NEMO, "freeze_config": frozen})
    assert found.setup.freeze.embeddings
    assert any("has not read it since" in note for note in found.notes)


@pytest.mark.parametrize(
    ("values", "words"),
    [({"model": {"pretrained_model_name_or_path": "a"}, "inference": {"height": 8}, "vae": {}},
      "makes pictures or videos"),
     ({**NEMO, "model": {"model_type": "flux", "mode": "finetune"}}, "the diffusion recipe")],
)  # fmt: skip
def test_nemo_s_pictures_are_one_line(values: dict[str, Any], words: str) -> None:
    assert stack_of(values) == "nemo"
    with pytest.raises(ConfigError, match=words):
        read(values)


def test_lightning() -> None:
    found = read(LIGHTNING)
    assert found.model == "openai-community/gpt2"
    setup = found.setup
    assert (setup.num_gpus, setup.micro_batch_size, setup.gradient_accumulation_steps) == (4, 3, 2)
    assert setup.precision is Precision.BF16_AMP


@pytest.mark.parametrize(
    ("strategy", "engine", "precision"),
    [
        ("fsdp", Engine.FSDP1, Precision.BF16_MIXED),
        ("deepspeed_stage_3", Engine.DEEPSPEED, Precision.BF16_MASTER),
        ({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}, Engine.FSDP,
         Precision.BF16_MIXED),
    ],
)  # fmt: skip
def test_lightnings_strategies(strategy: Any, engine: Engine, precision: Precision) -> None:
    trainer = {**LIGHTNING["trainer"], "strategy": strategy}
    setup = read({**LIGHTNING, "trainer": trainer}).setup
    assert (setup.engine, setup.precision) == (engine, precision)


def test_toml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\n')
    assert read_setup_file(path).setup.seq_len == 4096
    path.write_text("[model\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_setup_file(path)


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
    with pytest.raises(ConfigError, match="give it as `accelerate_config`"):
        read_setup_file(path)


def test_a_slip_in_a_setup_of_memplans_own_is_still_one(tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("num_gpus: 4\nmicro_batch_sice: 1\n")
    with pytest.raises(ConfigError, match="Did you mean 'micro_batch_size'"):
        read_setup_file(path)


# -- quantized bases and adapters ----------------------------------------------------------------


def test_axolotl_quantizes_twice() -> None:
    found = read({**AXOLOTL, "adapter": "qlora", "load_in_4bit": True, "lora_r": 4, "lora_alpha": 8,
                  "lora_target_linear": True})  # fmt: skip
    assert "nf4" in str(found.setup.quantize)
    assert dict(found.setup.engine_options)["double_quant"] is True
    assert "rank 4 on linear-names" in str(found.setup.adapter)
    assert found.setup.left_out == ()


def test_trl_holds_adapters_of_a_quantized_base_in_bf16() -> None:
    values = {**TRL, "use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear"}
    setup = read(values).setup
    assert "bf16" in str(setup.adapter)
    assert dict(setup.engine_options)["compute_dtype"] == "fp32"
    assert "bf16" not in str(read({**values, "load_in_4bit": False}).setup.adapter)


def test_what_is_asked_for_beside_a_preset_takes_its_quantization_away() -> None:
    setup = read_preset("unsloth", {"quantize": "none"}).setup
    assert setup.quantize in (None, "none")
    assert setup.engine_options == ()
    assert dict(read_preset("unsloth").setup.engine_options) == {"double_quant": True}


# -- jobs of more than one model -----------------------------------------------------------------


def test_trl_dpo_counts_pairs() -> None:
    setup = read_preset("trl-dpo").setup
    assert setup.job.kind.value == "dpo"
    assert setup.micro_batch_size == 8
    assert setup.left_out == ()


@pytest.mark.parametrize(
    ("loss", "kind"), [("sigmoid", "dpo"), ("orpo", "orpo"), ("simpo", "simpo")]
)
def test_llama_factorys_preferences(loss: str, kind: str) -> None:
    setup = read({**FACTORY, "stage": "dpo", "pref_loss": loss}).setup
    assert setup.job.kind.value == kind


def test_verl_generates_beside_the_training() -> None:
    job = read(VERL).setup.job
    assert (job.kind.value, job.gpu_memory_utilization, job.sleep) == ("grpo", 0.6, 2)
    assert (str(job.chosen_rollout.value), job.completion_length, job.scored_length) == (
        "vllm",
        3072,
        4096,
    )


def test_torchtunes_distillation() -> None:
    teacher = {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}
    assert read({**TORCHTUNE, "teacher_model": teacher}).setup.job.kind.value == "distillation"


@pytest.mark.parametrize(
    ("values", "how"),
    [
        pytest.param({**AXOLOTL, "activation_offloading": True}, "streamed", id="axolotl"),
        pytest.param({**AXOLOTL, "activation_offloading": "legacy"}, "blocking", id="legacy"),
        pytest.param(
            {**AXOLOTL, "activation_offloading": "hidden_states"}, "checkpoints", id="inputs"
        ),
        pytest.param({**AXOLOTL, "gradient_checkpointing": "offload"}, "streamed", id="older"),
        pytest.param({**AXOLOTL, "gradient_checkpointing": "offload_disk"}, "streamed", id="disk"),
        pytest.param({**AXOLOTL, "gradient_checkpointing": "unsloth"}, "checkpoints", id="unsloth"),
        pytest.param({**FACTORY, "use_unsloth_gc": True}, "checkpoints", id="LLaMA-Factory"),
        pytest.param({**TRL, "activation_offloading": True}, "streamed", id="TRL"),
        pytest.param(
            {**TORCHTUNE, "enable_activation_offloading": True}, "torchtune", id="torchtune"
        ),
    ],
)
def test_activations_that_go_to_cpu_ram(values: dict[str, Any], how: str) -> None:
    found = read(values)
    assert found.setup.offload_activations.value == how
    assert not any("upper bound" in note and "offload" in note for note in found.notes)


def test_a_trainers_file_is_read_with_what_it_is_launched_with() -> None:
    launcher = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
    launch = Launch(accelerate=EngineFile(values=launcher, source="ddp.yaml"))
    values = {**TRL, "dtype": "bfloat16", "per_device_train_batch_size": 4}
    setup = read_stack(values, "hf_trainer", source="file.yaml", launch=launch).setup
    assert setup.num_gpus == 8
    assert setup.precision is Precision.BF16_AUTOCAST
    assert setup.micro_batch_size == 4
    zero: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    launch = Launch(deepspeed=EngineFile(values=zero, source="zero3.json"))
    setup = read_stack(values, "hf_trainer", source="file.yaml", launch=launch).setup
    assert setup.chosen_engine is Engine.DEEPSPEED
    assert setup.precision is Precision.BF16_MASTER


@pytest.mark.parametrize(
    ("named", "made"),
    [("adamw_bnb_8bit", "adamw-fused"), ("lion_32bit", "lion-fused"), ("adamw_torch", "adamw-foreach")],
)  # fmt: skip
def test_offloaded_states_are_stepped_by_deepspeeds_own(named: str, made: str) -> None:
    """accelerate makes them (``map_pytorch_optim_to_deepspeed``), unless the file says that it is not to."""
    zero = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip
    launch = Launch(deepspeed=EngineFile(values=zero, source="zero2.json"))
    values = {**TRL, "optim": named, "bf16": True}
    found = read_stack(values, "hf_trainer", source="sft.yaml", launch=launch)
    assert found.setup.optimizer.value == made
    assert any("accelerate makes" in note for note in found.notes) is (named != "adamw_torch")
    kept = {**zero, "zero_force_ds_cpu_optimizer": False}
    launch = Launch(deepspeed=EngineFile(values=kept, source="zero2.json"))
    if named == "adamw_bnb_8bit":
        with pytest.raises(ConfigError, match="no form for the CPU"):
            read_stack(values, "hf_trainer", source="sft.yaml", launch=launch)


def test_nanotron_pads_its_vocabulary_and_no_engine_does_again() -> None:
    model = {**NANOTRON["model"]["model_config"], "vocab_size": 50257}
    values = {**NANOTRON, "model": {**NANOTRON["model"], "model_config": model}}
    found = read_stack(values, "nanotron", source="a.yaml")
    assert isinstance(found.model, dict)
    assert found.model["vocab_size"] == 50258  # a multiple of 1 x TP
    assert dict(found.setup.engine_options)["make_vocab_size_divisible_by"] == 1


def test_spectrums_file_names_what_alone_is_trained(tmp_path: Path) -> None:
    """It is named from the folder in which the script is started, above the recipe's."""
    place = tmp_path / "configs" / "30percent.yaml"
    place.parent.mkdir()
    place.write_text("unfrozen_parameters:\n- ^lm_head.weight$\n- model.layers.1.mlp.down_proj\n")
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    values = {**TRL, "spectrum_config_path": "configs/30percent.yaml"}
    found = read_stack(values, "hf_trainer", source="sft.yaml", folder=recipes)
    assert str(found.setup.freeze) == "all but ^lm_head.weight$ model.layers.1.mlp.down_proj"
    place.write_text("top_layer_types: []\n")
    with pytest.raises(ConfigError, match="no list of unfrozen_parameters"):
        read_stack(values, "hf_trainer", source="sft.yaml", folder=recipes)


def test_what_an_adapter_freezes_needs_no_names() -> None:
    beside = {**AXOLOTL, "adapter": "lora", "lora_r": 8, "unfrozen_parameters": ["^lm_head.*"]}
    assert str(read_stack(beside, "axolotl", source="a.yml").setup.freeze) == ""


def test_a_model_named_beside_a_file_is_what_its_words_are_about(tmp_path: Path) -> None:
    """How many stages two layers each make, and whether a picture is given at all, goes by the model that is trained."""
    path = tmp_path / "file.yaml"
    file = laid(NEMO, "distributed", {"strategy": "fsdp2", "pp_size": 4, "pipeline": {
        "pp_schedule": "interleaved1f1b", "pp_microbatch_size": 1, "layers_per_stage": 2,
        "round_virtual_stages_to_pp_multiple": "down"}})  # fmt: skip
    file = laid(
        file, "model", {"pretrained_model_name_or_path": "/not/here", "torch_dtype": "bf16"}
    )
    file["step_scheduler"] = {"global_batch_size": 64, "local_batch_size": 8}
    path.write_text(json.dumps(file))
    unknown = read_setup_file(path)
    known = read_setup_file(path, model="qwen3-8b")
    assert (unknown.setup.virtual_stages, known.setup.virtual_stages) == (2, 4)
    assert known.setup.layers_per_stage == (3, 3, 3, 3, *(2,) * 12)
    # Every command's answer is of the same setup.
    answer = memplan.estimate("qwen3-8b", str(path), gpu="h100")
    assert answer.setup.layers_per_stage == known.setup.layers_per_stage
    assert [
        each.setup.virtual_stages
        for each in memplan.sweep("qwen3-8b", setup=str(path), batch_size="1")
    ] == [4]


def laid(file: dict[str, Any], section: str, values: dict[str, Any]) -> dict[str, Any]:
    return {**file, section: values}
