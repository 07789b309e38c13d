"""LitGPT's ``finetune/lora.py`` (commit 8641822): Lightning Fabric, a GPT of its own.

``lit_gpt/model.py``: one matrix for queries, keys and values, as Phi-3 and GPT-NeoX have, rotary embeddings by multiply and add,
``torch.nn.functional.silu``. ``lit_gpt/rmsnorm.py``: the norm multiplies in the input's dtype and keeps the
input and a figure for each row, which memplan calls fused. ``lit_gpt/lora.py``: adapters on the query and value
parts, over bitsandbytes 0.41 where the base is quantized. ``lit_gpt/utils.py``: the loss in pieces of 128 tokens, each in the logits' dtype, all of which stay.
"""

from tests.measured.runs import (
    LackingError,
    Record,
    Run,
    Settings,
    basics,
    card_of,
    lora_of,
    model_of,
)

CITED = ("Lightning-AI/litgpt finetune/lora.py, lit_gpt/{model,lora,rmsnorm,utils}.py at 8641822",)


def resource_tables(record: Record) -> Run:
    """A row of ``tutorials/resource-tables.md``."""
    is_mixed = record["precision"].startswith("autocast")
    setup = basics(record) | {
        "precision": "bf16-amp" if is_mixed else "bf16",
        "optimizer": "adamw-foreach",
        "norm": "fused",
        "loss": "shifted_uncast",
        "outputs_held": True,
        "adapter": lora_of(record, targets=_targets(record), dtype="fp32" if is_mixed else "bf16"),
    }
    if "bnb.nf4" in record["precision"]:
        setup["quantize"] = "nf4"
        setup["optimizer"] = "bnb-paged-adamw"
        setup["engine_options"] = {
            "double_quant": "dq" in record["precision"],
            "compute_dtype": "bf16",
            "prepare_for_kbit": False,
            "quant_keeps_inputs": True,
        }
    if record["n_gpus"] > 1:
        if "load" in record["other"]:
            raise LackingError(feature="the whole model on each GPU before it is sharded")
        setup["engine"] = "fsdp1"
    return Run(model=_model(record), gpu=card_of(record), setup=setup, cited=CITED)


def _model(record: Record) -> str | Settings:
    """Its Llama, as the class of transformers that has the same matrices."""
    if record["config"].get("parallel_residual"):
        return model_of(record)
    return LLAMA_2_7B


LLAMA_2_7B: Settings = {
    "model_type": "phi3", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32,
    "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0, "sliding_window": None,
}  # fmt: skip


def _targets(record: Record) -> list[str]:
    is_parallel_residual = bool(record["config"].get("parallel_residual"))
    return ["query_key_value" if is_parallel_residual else "qkv_proj"]
