"""Megatron's states: bytes a parameter, buffers and shards; both ledgers agree."""

from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.job import Job
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.accounts import rank_account
from memplan.memory.megatron.buffers import groups_of, heaviest_ranks, lay_out, rank_kinds
from memplan.memory.megatron.options import MegatronStates, layers_of
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import round_up
from tests.memory.test_tally import given_for, played

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 32000,
    "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 4, "topk_group": 2,
    "tie_word_embeddings": False, "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip
DISTRIBUTED = {"use_distributed_optimizer": True}
AWARE = {**DISTRIBUTED, "use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("precision", "ranks", "options", "bytes_each"),
    [
        ("bf16-master", 4, {}, 18),
        ("bf16-master", 4, DISTRIBUTED, 6 + 12 / 4),
        ("bf16-master", 1, DISTRIBUTED, 18),
        ("fp32", 4, {}, 16),
        ("fp32", 4, DISTRIBUTED, 8 + 8 / 4),
        ("fp16-master", 4, {}, 20),
        ("fp16-master", 4, DISTRIBUTED, 4 + 16 / 4),
        ("bf16-master", 4, {**DISTRIBUTED, "grad_reduce_in_bf16": True}, 4 + 16 / 4),
        ("bf16-master", 4, AWARE, 6 + 10 / 4),
        ("bf16-master", 4, {**AWARE, "store_param_remainders": False}, 6 + 12 / 4),
        ("bf16-master", 4, {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 6 + 6 / 4),
        ("bf16-master", 4, {**AWARE, "main_grads_dtype": "bf16", "grad_reduce_in_bf16": True}, 4 + 10 / 4),
    ],
)  # fmt: skip
def test_bytes_a_parameter(
    precision: str, ranks: int, options: dict[str, Any], bytes_each: float
) -> None:
    """Between steps; docs/user-guide/features/dist_optimizer.md of Megatron-LM, and its FusedAdam's
    formats. Padding, counters and blocks' rounding make up less than 0.1 %."""
    setup = TrainingSetup(
        num_gpus=ranks, engine="megatron", precision=precision, seq_len=128, kernel_scratch=False,  # type: ignore[arg-type]
        engine_options={
            "transformer_impl": "local", "gradient_accumulation_fusion": False,
            "make_vocab_size_divisible_by": 1, **options,
        },
    )  # fmt: skip
    model = load_model(LLAMA)
    account = estimate(model, setup).account
    states = ("parameters", "gradients", "master_weights", "optimizer_states")
    held = sum(account.phases[-2].components.get(name, 0) for name in states)
    assert held == pytest.approx(bytes_each * model.num_params, rel=2e-5)
    assert held >= bytes_each * model.num_params


def test_buckets_and_shards() -> None:
    """The last weight lies first; a bucket ends once it is full, and shards go across weights."""
    states = MegatronStates(
        use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=1000
    )
    buffer = lay_out((700, 500, 600, 100), states, 4)
    assert [(each.start, each.stop) for each in buffer.buckets] == [(0, 1280), (1280, 2048)]
    assert [laid.number for laid in buffer.buckets[0].weights] == [3, 2, 1]
    # 100 from 0, 600 from 128, 500 from 768; then 700 from 1280.
    assert buffer.shards(0, 4) == [(3, 100), (2, 192), (0, 192)]
    assert buffer.shards(3, 4) == [(1, 308), (0, 124)]
    whole = [sum(numel for rank in range(4) for number, numel in buffer.shards(rank, 4) if number == each)
             for each in range(4)]  # fmt: skip
    assert whole == [700, 500, 600, 100]


@pytest.mark.parametrize(
    "options",
    [
        {"transformer_impl": "local", "recompute_granularity": "selective", "recompute_modules": "core_attn mlp"},
        {"transformer_impl": "local", "recompute_granularity": "full", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
    ],
    ids=["selective", "chunks", "engine selective", "engine block"],
)  # fmt: skip
def test_both_ledgers(options: dict[str, Any]) -> None:
    """Added up as played out, one batch after another."""
    for length, sequence in ((512, True), (96, False)):
        asked = given_for(
            "llama",
            {
                "engine": "megatron", "num_gpus": 4, "tensor_parallel": 2, "seq_len": length,
                "sequence_parallel": sequence, "gradient_accumulation_steps": 2,
                "engine_options": {**DISTRIBUTED, **options},
            },
        )  # fmt: skip
        made = rank_account(asked, rank=0)
        expected = played(asked, 0)
        peaks = {phase.name: phase.peak_bytes for phase in made.phases if phase.name != "save"}
        expected.pop("first step", None)
        assert {name: expected[name] for name in peaks} == peaks, (length, sequence)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpus": 8, "pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"num_gpus": 4, "pipeline_parallel": 2, "context_parallel": 2, "context_parallel_kind": "all-to-all"},
        {"num_gpus": 4, "pipeline_parallel": 2, "context_parallel": 2},
        {"num_gpus": 4, "pipeline_parallel": 2, "pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2,
         "engine_options": {"recompute_granularity": "full"}},
    ],
    ids=["stages", "heads exchanged", "a ring", "interleaved and recomputed"],
)  # fmt: skip
def test_both_ledgers_of_a_pipeline(fields: dict[str, Any]) -> None:
    """Each rank's stages, added up as played out."""
    check_both_ledgers(LLAMA, fields)


def test_both_ledgers_of_experts() -> None:
    """Latent attention and experts, spread over ranks and over stages."""
    spread = {"num_gpus": 8, "expert_parallel": 4, "engine_options": DISTRIBUTED}
    check_both_ledgers(DEEPSEEK, spread)
    check_both_ledgers(DEEPSEEK, {**spread, "expert_parallel": 2, "pipeline_parallel": 2})
    split = {"num_gpus": 8, "tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
    modules = ["layernorm", "moe_act", "mla_up_proj", "shared_experts"]
    again = {"recompute_granularity": "selective", "recompute_modules": modules}
    check_both_ledgers(DEEPSEEK, {**split, "engine_options": {**DISTRIBUTED, **again}})


def test_experts_are_sharded_over_fewer_ranks() -> None:
    """Those of one rank over the ranks that have the same ones; each other weight over all."""
    fields = {"num_gpus": 8, "expert_parallel": 4, "engine_options": DISTRIBUTED}
    given = Job.of(load_model(DEEPSEEK), TrainingSetup(engine="megatron", **fields), None).given
    dense, experts = groups_of(given, MegatronStates(use_distributed_optimizer=True))
    assert (dense.num_ranks, experts.num_ranks, experts.stride) == (8, 2, 4)
    each = 3 * 256 * 512
    assert sum(numel for _, numel in experts.shards(0)) == 16 * each // 4 // 2 * 3
    whole = {**DISTRIBUTED, "expert_tensor_parallel_size": 1}
    split = {"num_gpus": 8, "tensor_parallel": 2, "sequence_parallel": True}
    for options, expert_parallel, shape in ((whole, 4, (2, 4)), (DISTRIBUTED, 2, (2, 4))):
        setup = TrainingSetup(
            engine="megatron", expert_parallel=expert_parallel, engine_options=options, **split
        )
        given = Job.of(load_model(DEEPSEEK), setup, None).given
        dense, experts = groups_of(given, MegatronStates(use_distributed_optimizer=True))
        assert (dense.num_ranks, dense.stride) == (4, 2)
        assert (experts.num_ranks, experts.stride) == shape
        own = sum(numel for _, numel in experts.shards(0))
        assert own == 16 * each // (2 * expert_parallel if options is DISTRIBUTED else 4) // 2 * 3
        # Ranks of one kind keep shards of the same sizes, and the heaviest the most.
        states = MegatronStates(use_distributed_optimizer=True)
        kept = {
            rank: sorted(
                round_up(4 * numel, ALLOCATION_ROUNDING)
                for group in groups_of(given, states)
                for _, numel in group.shards(rank)
            )
            for rank in range(setup.num_gpus)
        }
        kinds = [[kept[rank] for run in runs for rank in run] for runs in rank_kinds(given)]
        assert all(each == kind[0] for kind in kinds for each in kind)
        assert sum(map(len, kinds)) == len(kept)
        assert len({str(kind[0]) for kind in kinds}) == len(kinds)
        most = max(sum(sizes) for sizes in kept.values())
        assert sum(kept[heaviest_ranks(given)[0]]) == most
    with pytest.raises(SetupError, match="8 = 3 x 2"):
        estimate(
            load_model(DEEPSEEK),
            TrainingSetup(engine="megatron", **{**fields, "expert_parallel": 3}),
        )


def check_both_ledgers(config: dict[str, Any], fields: dict[str, Any]) -> None:
    asked = {"engine": "megatron", "seq_len": 256, "gradient_accumulation_steps": 4, **fields}
    job = Job.of(load_model(config), TrainingSetup(**asked), None)
    for rank in (0, asked["num_gpus"] - 1):
        made = rank_account(job.given, rank=rank)
        expected = played(job.given, rank)
        peaks = {phase.name: phase.peak_bytes for phase in made.phases if phase.name != "save"}
        expected.pop("first step", None)
        assert {name: expected[name] for name in peaks} == peaks, rank


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_options": {"use_distributed_optimiser": True}}, "Did you mean 'use_distributed_optimizer'"),
        ({"engine_options": {"recompute_num_layers": 2}}, "needs recompute_granularity=full"),
        ({"engine_options": {"exp_avg_dtype": "bf16"}}, "needs use_precision_aware_optimizer"),
        ({"checkpointing": "full", "engine_options": {"recompute_granularity": "full"}}, "say it once"),
        ({"attention": "flash"}, "attention: is not modelled with the engine megatron"),
        ({"precision": "bf16"}, "take bf16-master, or wrap_with_ddp=false"),
        ({"sequence_parallel": True}, "that is 1"),
        ({"loss_parallel": True, "tensor_parallel": 2}, "always split"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        estimate(load_model(LLAMA), TrainingSetup(num_gpus=2, engine="megatron", **fields))  # type: ignore[arg-type]


def test_what_is_no_decoder_is_refused() -> None:
    bert = {
        "model_type": "bert", "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512,
        "num_hidden_layers": 2, "vocab_size": 1000,
    }  # fmt: skip
    with pytest.raises(SetupError, match="only decoders with a language model's head"):
        estimate(load_model(bert, "masked-lm"), TrainingSetup(num_gpus=2, engine="megatron"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("checkpointing", "options"),
    [
        ("2", {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
        ("full", {"recompute_granularity": "full"}),
        ("selective", {"recompute_granularity": "selective"}),
        ("none", {}),
    ],
)  # fmt: skip
def test_checkpointing_in_megatrons_words(checkpointing: str, options: dict[str, Any]) -> None:
    asked = {"num_gpus": 2, "engine": "megatron", "seq_len": 128}
    said = TrainingSetup(**asked, checkpointing=checkpointing).resolve(None)
    assert layers_of(said) == layers_of(
        TrainingSetup(**asked, engine_options=options).resolve(None)
    )


def test_towers_are_left_out() -> None:
    """The language model's layers are Megatron's; what sees is named, and no verdict says that it fits."""
    found = estimate(
        load_model("qwen2.5-vl-3b"),
        TrainingSetup(num_gpus=1, engine="megatron", seq_len=128),  # type: ignore[arg-type]
    )
    assert any("Megatron's towers" in text for text in found.unmodelled)
    with pytest.raises(SetupError, match="other parts than"):
        estimate(
            load_model("llama-3.2-11b-vision"),
            TrainingSetup(num_gpus=1, engine="megatron", seq_len=128),  # type: ignore[arg-type]
        )
