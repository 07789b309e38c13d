"""LitGPT's ``finetune/lora.py`` (commit 8641822): Lightning Fabric, a GPT of its own.

``lit_gpt/model.py``: one matrix for queries, keys and values, rotary embeddings by multiply and add,
``torch.nn.functional.silu``. ``lit_gpt/rmsnorm.py``: the norm multiplies in the input's dtype and keeps the
input and a figure for each row, which memplan calls fused. ``lit_gpt/lora.py``: adapters on the query and value
parts. ``lit_gpt/utils.py``: the loss in pieces of 128 tokens, each in the logits' dtype, all of which stay.
"""

from tests.measured.runs import (
    LackingError,
    Record,
    Run,
    basics,
    card_of,
    lora_of,
    model_of,
)

CITED = ("Lightning-AI/litgpt finetune/lora.py, lit_gpt/{model,lora,rmsnorm,utils}.py at 8641822",)


def resource_tables(record: Record) -> Run:
    """A row of ``tutorials/resource-tables.md``."""
    is_parallel_residual = bool(record["config"].get("parallel_residual"))
    targets = ["query_key_value"] if is_parallel_residual else ["q_proj", "v_proj"]
    is_mixed = record["precision"].startswith("autocast")
    setup = basics(record) | {
        "precision": "bf16-amp" if is_mixed else "bf16",
        "optimizer": "adamw-foreach",
        "norm": "fused",
        "loss": "shifted_uncast",
        "outputs_held": True,
        "adapter": lora_of(record, targets=targets, dtype="fp32" if is_mixed else "bf16"),
    }
    if "bnb.nf4" in record["precision"]:
        setup["quantize"] = "nf4"
        setup["optimizer"] = "paged_adamw_32bit"
        setup["engine_options"] = {
            "double_quant": "dq" in record["precision"],
            "compute_dtype": "bf16",
            "prepare_for_kbit": False,
        }
    if record["n_gpus"] > 1:
        if "load" in record["other"]:
            raise LackingError(
                feature="a peak at loading: the whole model on each GPU before it is sharded"
            )
        setup["engine"] = "fsdp1"
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=CITED)
