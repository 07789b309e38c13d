"""MosaicML's llm-foundry throughput tables: which micro-batch ran, and nothing of its memory.

MPT of ``scripts/train/yamls/pretrain/mpt-*.yaml``: learned positions, no biases, four times the width,
flash attention and a fused cross-entropy; Composer over FSDP1: ``mixed_precision: DEFAULT`` keeps fp32
shards under autocast (bf16 gathered, fp32 reduced), ``PURE`` reduces in bf16 too; DecoupledAdamW in fp32.
"""

from tests.measured.runs import Record, Run, basics, card_of

SIZES = {
    "mpt-125m": (768, 12, 12), "mpt-350m": (1024, 16, 24), "mpt-760m": (1536, 12, 24),
    "mpt-1b": (2048, 16, 24), "mpt-3b": (2560, 20, 32), "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40), "mpt-30b": (7168, 56, 48), "mpt-70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads and layers of each yaml."""
VOCABULARY = 50368


def throughput_tables(record: Record) -> Run:
    """A row of ``scripts/train/benchmarking/README.md``."""
    is_pure = "PURE" in record["precision"]
    setup = basics(record) | {
        "engine": "fsdp1",
        "precision": "bf16-mixed",
        "optimizer": "adamw-loop",
        "loss": "flash_attn",
        "engine_options": {"autocast": not is_pure, "reduce_dtype": "bf16" if is_pure else "fp32"},
    }
    if "fp8" in record["precision"]:
        setup["fp8"] = "te-delayed"
    if "SHARD_GRAD_OP" in record["parallel"]["sharding"]:
        setup["fsdp_strategy"] = "shard_grad_op"
    return Run(
        model=_mpt(record),
        gpu=card_of(record),
        setup=setup,
        cited=(
            "mosaicml/llm-foundry scripts/train/benchmarking/README.md, scripts/train/yamls/pretrain",
        ),
    )


def _mpt(record: Record) -> dict[str, object]:
    """Its own MPT, which is GPT-2 without biases; transformers' has ALiBi instead of positions."""
    width, heads, layers = SIZES[record["model"]]
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "vocab_size": VOCABULARY,
        "n_positions": record["seq_len"],
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
