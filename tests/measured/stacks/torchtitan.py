"""torchtitan: FSDP2, its own Llama, ``train_configs/*.toml`` at the commit.

Until #985 (3b39d7ab0f3d, March 2025) ``norm_type = "rmsnorm"`` was written out in Python, so eager; until June 2025
(#1200s) layers and the root were the only units. Selective checkpointing keeps the attention's output and every
other matrix product (``torchtitan/parallelisms/parallelize_llama.py``).
"""

import re

from tests.measured.runs import (
    LackingError,
    Record,
    Run,
    Settings,
    UnstatedError,
    basics,
    card_of,
    is_model_parallel,
    model_of,
)

CITED = (
    "pytorch/torchtitan train_configs/llama3_8b.toml and torchtitan/models at the record's commit",
)
EAGER_NORM = ("tt-t", "tt-822", "tt-996", "tt-355", "tt-actoff", "tt-fsdpwrap", "tt-833", "tt-gpt2")
"""Records of commits before nn.RMSNorm (#985)."""
UNIT_OF_LAYERS = (*EAGER_NORM, "tt-985", "tt-1230", "tt-887")
"""Records of commits before embedding and head became units of their own."""
OUTPUTS_KEPT = ("tt-355",)
"""Records of commits before e29b6b4d4 (#391, June 2024): ``pred``, in fp32, lives on in backward."""
SEPARATE_TOOLS = ("graph", "SimpleFSDP")


def torchtitan(record: Record) -> Run:
    """A row of a benchmark page, or of a commit message."""
    if is_model_parallel(record):
        raise LackingError(feature="tensor, pipeline or context parallelism")
    sharding = record["parallel"]["sharding"] + str(record["compile"])
    for tool in SEPARATE_TOOLS:
        if tool in sharding:
            raise LackingError(
                feature=f"torchtitan's {'graph trainer' if tool == 'graph' else tool}"
            )
    if "GPU count not stated" in record["other"]:
        raise UnstatedError(feature="the number of GPUs")
    if record["offload"] != "none":
        raise UnstatedError(feature="offloaded activations, which of them unsaid")
    setup = basics(record) | {
        "engine": "fsdp",
        "precision": "bf16-mixed",
        "kernels": "torchtitan",
        "engine_options": _options(record),
    }
    setup |= _kernels(record)
    if record["id"].startswith(OUTPUTS_KEPT):
        setup |= {"outputs_held": True, "upcast_outputs": True}
    if "float8" in record["precision"]:
        setup["fp8"] = "torchao-tensorwise"
    if record["compile"]:
        setup["compile"] = "layer"
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=CITED)


def _options(record: Record) -> Settings:
    is_old = record["id"].startswith(UNIT_OF_LAYERS)
    options: Settings = {"init_device": "meta", "wrapping": "layers" if is_old else "torchtitan"}
    if re.search(r"never|reshard_after_forward=False", record["parallel"]["sharding"]):
        options["reshard_after_forward"] = False
    return options


def _kernels(record: Record) -> Settings:
    """The norm by date; Qwen3's rotary as transformers has it; a chunked loss where the record names one."""
    kernels: Settings = {}
    if record["id"].startswith(EAGER_NORM):
        kernels["norm"] = "eager"
    if record["model"].startswith("qwen3"):
        kernels |= {"kernels": "hf", "norm": "fused"}
    if "chunked over tokens" in record["other"] or "chunked CE" in record["other"]:
        kernels["loss"] = "chunked"
    return kernels
