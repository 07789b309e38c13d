"""prime-rl's TOML: ``sft`` files, and ``rl`` files, whose trainer is on GPUs of its own.

FSDP2 over fp32 shards (``src/prime_rl/trainer/model.py``); sequences are packed to ``seq_len``, one row for each
micro-batch. GPUs that generate are not the trainer's, and are not counted.
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.found import Found
from memplan.sources.stacks.keys import Keys
from memplan.sources.stacks.optimizer import add_named_optimizer
from memplan.sources.stacks.wording import lora

NAME = "prime-rl"

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_ATTENTION = {
    "auto": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash3", "fa4": "flash",
    "flash_attention_4": "flash", "sdpa": "sdpa", "eager": "eager",
}  # fmt: skip
_MARKS = frozenset({"orchestrator", "inference", "deployment", "weight_broadcast"})
_SERVING = ("vllm", "use_deep_gemm", "router", "kv_cache_offload")
"""Sections of a file that serves a model."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether its sections are there."""
    trainer, data, model = (values.get(name) for name in ("trainer", "data", "model"))
    has_trainer = isinstance(trainer, Mapping) and bool({"model", "data", "optim"} & trainer.keys())
    is_sft = (
        isinstance(data, Mapping)
        and isinstance(model, Mapping)
        and not {"flavor", "class_path", "partial_pretrain"} & model.keys()
        and bool({"seq_len", "micro_batch_size", "fake", "type"} & data.keys())
    )
    serves = "vllm" in values and "router" in values
    return bool(_MARKS & values.keys()) or has_trainer or is_sft or serves


def preset_for(_values: Mapping[str, object]) -> str:
    """It has one set of defaults."""
    return "prime-rl"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    for serving in _SERVING:
        if keys.has(serving):
            keys.refuse(serving, "this file serves a model, and trains none")
    is_rl = keys.has("orchestrator") or keys.has("trainer")
    if is_rl:
        _merge_trainer(keys)
    found.model = keys.text("model.name")
    _read_sizes(keys, found, is_rl=is_rl)
    _read_engine(keys, found)
    _read_checkpointing(keys, found)
    found.fields["attention"] = keys.choice("model.attn", _ATTENTION)
    compiled = keys.values.get("model.compile", keys.take("model.compile"))
    section = keys.section("model.compile")
    off = compiled in ("None", "none", False)
    found.fields["compile"] = "none" if off and not section else "layer"
    add_named_optimizer(keys, "optim.type", found, given, form="foreach")
    _read_adapter(keys, found)
    chunk = keys.take("model.fused_lm_head_token_chunk_size")
    if chunk not in (*OFF, "disabled"):
        found.fields["loss"] = "chunked"
    if is_rl:
        found.notes.append("counted: the trainer's GPUs, with the loss of the next token")


def _merge_trainer(keys: Keys) -> None:
    """An ``rl`` file has the trainer's sections below ``trainer``, and shares some of its own."""
    for key in list(keys.values):
        inner = key.removeprefix("trainer.")
        if inner != key:
            keys.values[inner] = keys.values.pop(key)
    for shared in ("seq_len",):
        if shared in keys.values:
            keys.values.setdefault("model.seq_len", keys.values.pop(shared))


def _read_sizes(keys: Keys, found: Found, *, is_rl: bool) -> None:
    if is_rl or not keys.has("data"):
        length = keys.count("model.seq_len")
        keys.taken -= {"data.seq_len"}
    else:
        length = keys.count("data.seq_len")
    found.fields["seq_len"] = length
    found.fields["micro_batch_size"] = keys.count("data.micro_batch_size") or 1
    found.fields["packing"] = "documents"
    nodes = keys.count("deployment.num_train_nodes") or 1
    on_each = keys.count("deployment.gpus_per_node") or 8
    kind = keys.text("deployment.type")
    single = keys.count("deployment.num_train_gpus") or 1
    found.fields["num_gpus"] = nodes * on_each if kind == "multi_node" else single
    if kind == "multi_node":
        found.fields["num_nodes"] = nodes


def _read_engine(keys: Keys, found: Found) -> None:
    found.options["init_device"] = "to_empty"
    weights = keys.text("model.optimization_dtype") or "float32"
    found.fields["precision"] = "bf16-mixed" if weights == "float32" else "bf16"
    found.options["reduce_dtype"] = keys.choice("model.reduce_dtype", _DTYPES)
    if keys.take("model.reshard_after_forward") is False:
        found.options["reshard_after_forward"] = False
    replicas = keys.count("model.dp_replicate")
    if replicas not in (None, 1):
        found.options["data_parallel_replicate_degree"] = replicas
    if keys.flag("model.fsdp_cpu_offload"):
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    elif keys.flag("model.optim_cpu_offload"):
        found.notes.append(
            "model.optim_cpu_offload moves optimizer states to the CPU between steps: they are counted, "
            "as the step holds them"
        )
    context = keys.count("model.cp")
    if context not in (None, 1):
        found.fields["context_parallel"] = context
    experts = keys.take("model.ep")
    if isinstance(experts, int) and experts > 1:
        found.fields["expert_parallel"] = experts


def _read_checkpointing(keys: Keys, found: Found) -> None:
    whole = keys.take("model.ac")
    mode = keys.text("model.ac.mode")
    every = keys.count("model.ac.freq") or 1
    keys.names("model.ac.targets")
    if whole in ("None", "none", False):
        found.fields["checkpointing"] = "none"
    elif mode == "selective":
        found.fields["checkpointing"] = "none"
        found.notes.append("model.ac.mode selective is counted as none, an upper bound")
    else:
        found.fields["checkpointing"] = "full" if every == 1 else 1 / every
    section = keys.section("model.ac_offloading")
    if section or keys.take("model.ac_offloading") not in ("None", "none", False):
        found.notes.append(
            "model.ac_offloading moves checkpoints to the CPU, which is not modelled: the figures are "
            "upper bounds"
        )


def _read_adapter(keys: Keys, found: Found) -> None:
    given = keys.has("model.lora")
    rank, alpha = keys.count("model.lora.rank"), keys.number("model.lora.alpha")
    dropout, names = keys.number("model.lora.dropout"), keys.names("model.lora.target_modules")
    saved = keys.names("model.lora.modules_to_save")
    if given and keys.values.get("model.lora") not in ("None", "none", False):
        found.fields["adapter"] = lora(
            rank=rank or 16, alpha=alpha, dropout=dropout, targets=names, modules_to_save=saved
        )
    else:
        keys.taken -= {each for each in keys.taken if each.startswith("model.lora.")}
