"""Answer.AI's fsdp_qlora (``train.py`` of March 2024): a loop of its own over FSDP1, transformers 4.38.

``train.py``: precision bf16 without autocast, torch.optim.AdamW (not fused), each decoder layer and each
adapter matrix a unit, ``use_orig_params=False``, ``output`` kept while backward runs, the default
targets (lines "lora_target_modules": k, q, v, up, down, gate). ``low_memory`` is its default: one rank has the
packed model in CPU memory, the others on ``meta``, and units come to the GPU one by one.
"""

from tests.measured.runs import Record, Run, basics, card_of, lora_of, model_of

CITED = (
    "AnswerDotAI/fsdp_qlora train.py",
    "transformers 4.38: fp32 logits, shifted copies of them",
)
TARGETS = ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]


def fsdp_qlora(record: Record) -> Run:
    """A row of ``benchmarks_03_2024.md``."""
    is_quantized = "NF4" in record["precision"]
    setup = basics(record) | {
        "engine": "fsdp1",
        "precision": "bf16",
        "optimizer": "adamw-foreach",
        "loss": "shifted",
        "outputs_held": True,
        "adapter": lora_of(record, targets=TARGETS, dtype="bf16"),
    }
    if "NO_SHARD" in record["parallel"]["sharding"]:
        setup["fsdp_strategy"] = "no_shard"
    if "offload" in record["offload"]:
        setup |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    if is_quantized:
        setup["quantize"] = "nf4"
        setup["engine_options"] = {
            "compute_dtype": "bf16",
            "quant_storage": "bf16",
            "double_quant": False,
            "prepare_for_kbit": False,
        }
        setup["engine_options"] |= {"init_device": "meta"}
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=CITED)
