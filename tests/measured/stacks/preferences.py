"""Recipes that say on which cards they ran: DPO of the alignment handbook, GRPO of verl."""

from tests.measured.runs import Record, Run, basics, card_of, model_of

HANDBOOK_CITED = (
    "huggingface/alignment-handbook recipes/zephyr-7b-beta/{README.md,dpo/config_full.yaml}",
    "huggingface/alignment-handbook recipes/accelerate_configs/zero3.yaml",
)


def alignment_handbook(record: Record) -> Run:
    """Zephyr's DPO: TRL under ZeRO-3, checkpointed, eight cards of 80 GB."""
    setup = basics(record) | {
        "engine": "deepspeed",
        "zero_stage": 3,
        "optimizer": "adamw-fused",
        "job": "dpo",
    }
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=HANDBOOK_CITED)


VERL_CITED = (
    "volcengine/verl examples/grpo_trainer/run_qwen2-7b_seq_balance.sh at a65c9157bc0b",
    "volcengine/verl docs/algo/baseline.md, docs/perf/device_tuning.rst, examples/tuning/7b",
)


def verl(record: Record) -> Run:
    """GRPO over FSDP1 with fp32 shards, a frozen reference in CPU memory, vLLM on the same cards.

    ``free_cache_engine`` is its default: vLLM sleeps while the model is trained. Rows are packed without
    padding, so that the tokens of a micro-batch are stated instead of its rows.
    """
    share = 0.6
    setup = basics(record) | {
        "engine": "fsdp1",
        "precision": "bf16-mixed",
        "optimizer": "adamw-foreach",
        "packing": "padding_free",
        "job": f"grpo:reference=same,rollout=vllm,gpu_memory_utilization={share},sleep=1",
    }
    if "CPU" in record["offload"]:
        setup |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=VERL_CITED)
