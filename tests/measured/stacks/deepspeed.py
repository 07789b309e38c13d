"""DeepSpeed's own examples, and Stas Bekman's ml-engineering."""

import re

from tests.measured.runs import (
    LackingError,
    Record,
    Run,
    basics,
    card_of,
    gpt_like,
    model_of,
)

ML_ENGINEERING_CITED = (
    "stas00/ml-engineering insights/when-to-upgrade-gpus/benchmark.py: no zero.Init, overlap_comm",
)


def ml_engineering(record: Record) -> Run:
    """A row of ``insights/when-to-upgrade-gpus``: Llama-3.1-8B under ZeRO-2 and 3 on eight cards."""
    if record["what"] == "activation only":
        raise LackingError(feature="the activations of one layer alone")
    setup = basics(record) | {
        "engine": "deepspeed",
        "zero_stage": int(record["parallel"]["sharding"][-1]),
        "attention": "flash",
        "engine_options": {"overlap_comm": True, "zero_init": False},
    }
    if "liger0" not in record["id"]:
        setup["kernels"] = "liger"
    if "CPU" in record["offload"]:
        setup["offload_optimizer"] = "cpu"
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=ML_ENGINEERING_CITED)


SDMA_OPTIONS = {
    "reduce_bucket_size": 50_000_000,
    "overlap_comm": True,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_gather_16bit_weights_on_model_save": True,
    "sub_group_size": 1_000_000_000_000,
}
"""``examples/sdma_allgather/ds_config_zero3.json``."""


def sdma_allgather(record: Record) -> Run:
    """``examples/sdma_allgather``: Qwen3-32B under ZeRO-3, random weights.

    ``train_qwen3_zero3.py`` sets ``cfg.attn_implementation``, which transformers does not read
    (it reads ``_attn_implementation``), so the attention is its default; ``out`` lives on in backward.
    """
    setup = basics(record) | {
        "engine": "deepspeed",
        "zero_stage": 3,
        "attention": "sdpa",
        "outputs_held": True,
        "allocator": "expandable",
        "engine_options": SDMA_OPTIONS,
    }
    cited = (
        "deepspeedai/DeepSpeed examples/sdma_allgather/{train_qwen3_zero3.py,ds_config_zero3.json}",
    )
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=cited)


BF16_MASTER_SIZES = {
    "layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50000, "positions": 2048,
    "tied": False,
}  # fmt: skip
"""``training/bf16_master_weight/train.py``: nn.MultiheadAttention, GELU, layer norms."""


def bf16_master_weights(record: Record) -> Run:
    """``training/bf16_master_weight``: a GPT of its own under ZeRO-3, with and without bf16 masters."""
    options: dict[str, object] = {
        "reduce_bucket_size": 50_000_000,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 0,
    }
    if "bf16 master" in record["precision"]:
        options |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    setup = basics(record) | {"engine": "deepspeed", "zero_stage": 3, "engine_options": options}
    return Run(
        model=gpt_like(BF16_MASTER_SIZES) | {"n_positions": _positions(record)},
        gpu=card_of(record),
        setup=setup,
        cited=(
            "deepspeedai/DeepSpeedExamples training/bf16_master_weight/{train.py,README.md,configs}",
        ),
    )


def _positions(record: Record) -> int:
    stated = re.search(r"(\d+) positions", record["model"])
    return int(stated[1]) if stated else int(record["seq_len"])
