"""torchtune's README (llama3.1 and 3.2): recipes' own defaults, packed to the length, compiled.

``recipes/configs/llama3_1/*.yaml``: checkpointing on, chunked cross-entropy, bf16; full: PagedAdamW8bit stepped in
backward; LoRA: rank 8 (16 for 70B) on q, v, output and the MLP. Which counter its table shows is not stated.
"""

from tests.measured.runs import Record, Run, basics, card_of, model_of

CITED = ("pytorch/torchtune README.md, recipes/configs/llama3_1/*.yaml",)
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def torchtune(record: Record) -> Run:
    """A row of the README's table."""
    is_sharded = record["n_gpus"] > 1
    setup = basics(record) | {
        "engine": "fsdp" if is_sharded else "ddp",
        "precision": "bf16",
        "optimizer": "adamw-fused",
        "loss": "torchtune",
        "norm": "fused",
        "compile": "layer",
    }
    if "PagedAdamW8bit" in record["optimizer"]:
        setup |= {"optimizer": "bnb-paged-adamw-8bit", "optimizer_in_backward": True}
    if "CPU offload" in record["offload"]:
        setup |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    if record["lora"] != "none":
        rank = 16 if "70b" in record["model"] or "405b" in record["model"] else 8
        setup["adapter"] = {"lora": {"rank": rank, "targets": TARGETS, "dtype": "bf16"}}
    if "NF4" in record["precision"]:
        setup |= {"quantize": "nf4"}
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=CITED)
