"""prime-rl's TOML: ``sft`` files, and ``rl`` files, whose trainer is on GPUs of its own.

FSDP2 over fp32 shards (``src/prime_rl/trainer/model.py``); sequences are packed to ``seq_len``, one row for each
micro-batch. GPUs that generate are not the trainer's, and are not counted.
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import given_text_alone, model_type
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.wording import lora

NAME = "prime-rl"

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
"""``BaseModelConfig.name`` (prime_rl/configs/shared.py)."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_ATTENTION = {
    "auto": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash3", "fa4": "flash",
    "flash_attention_4": "flash", "sdpa": "sdpa", "eager": "eager",
}  # fmt: skip
_MARKS = frozenset({"orchestrator", "inference", "deployment", "weight_broadcast"})
_SFT_SECTIONS = frozenset({
    "slurm", "model", "data", "optim", "scheduler", "ckpt", "log", "run", "monitors", "renderer",
    "tokenizer", "max_steps", "output_dir", "env_vars", "val", "loss", "resume", "gc",
})  # fmt: skip
"""Of a file for ``sft`` alone."""
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
    if isinstance(model, Mapping) and "pretrained_model_name_or_path" in model:
        return False
    if "slurm" in values and values.keys() <= _SFT_SECTIONS:
        return True
    return bool(_MARKS & values.keys()) or has_trainer or is_sft or serves


def preset_for(_values: Mapping[str, object], _source: str) -> str:
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
    elif keys.has("model.seq_len") and not keys.has("data.seq_len"):
        is_rl = True  # a file for the trainer of ``rl`` alone, whose data come from an orchestrator
    found.model = keys.model("model.name")
    if found.model is None and keys.values:
        found.model = DEFAULT_MODEL
        found.notes.append(f"model.name is not given: {DEFAULT_MODEL}, prime-rl's default")
    _read_sizes(keys, found, given, is_rl=is_rl)
    _read_engine(keys, found)
    _read_checkpointing(keys, found)
    found.fields["attention"] = keys.choice("model.attn", _ATTENTION)
    _read_context(keys, found)
    _read_validation(keys, found)
    _read_compile(keys, found)
    _read_optimizer(keys, found, given)
    _read_adapter(keys, found)
    _read_experts(keys, found, given)
    _read_pictures(keys, found)
    _read_loss(keys, found)
    if is_rl:
        found.notes.append("counted: the trainer's GPUs, with the loss of the next token")
        _read_rollouts(keys, found, given)


def _read_compile(keys: Keys, found: Found) -> None:
    compiled = keys.values.get("model.compile", keys.take("model.compile"))
    section = keys.section("model.compile")
    off = compiled in ("None", "none", False)
    found.fields["compile"] = "none" if off and not section else "layer"


def _read_pictures(keys: Keys, found: Found) -> None:
    if keys.has("model.vlm") and keys.flag("model.vlm.freeze_vision_encoder"):
        if "adapter" not in found.fields:
            found.fields["freeze"] = "vision_tower"
    else:
        keys.taken.discard("model.vlm.freeze_vision_encoder")
    if not keys.has("model.vlm"):
        given_text_alone(found)  # ``VLMConfig``: pictures where the section is alone


def _read_loss(keys: Keys, found: Found) -> None:
    chunk = keys.take("model.fused_lm_head_token_chunk_size")
    if chunk not in (*OFF, "disabled"):
        found.fields["loss"] = "chunked"
        if isinstance(chunk, int):
            found.fields["loss_tiles"] = _pieces(found, chunk)


def _read_validation(keys: Keys, found: Found) -> None:
    """Micro-batches of the section's own data, of which the loss alone stays (``run_validation``)."""
    length = keys.count("val.data.seq_len") or DEFAULT_LENGTH
    size = keys.count("val.data.micro_batch_size") or 1
    if keys.has("val"):
        found.fields["evaluation"] = {"batch_size": size, "seq_len": length}


DEFAULT_LENGTH = 128
"""``SFTDataConfig.seq_len`` (configs/sft.py)."""


def _read_rollouts(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Rows that a step's rollouts make at the most; they are packed, so that there are fewer of short ones.

    Made-up data are rows of the whole length (``trainer/rl/data.py``, ``FakeDataLoader``).
    """
    rollouts, made_up = keys.count("orchestrator.batch_size"), keys.has("data.fake")
    if rollouts is None and not (keys.has("orchestrator") or made_up):
        return
    gpus = given.get("num_gpus") or found.fields["num_gpus"]
    shared = found.fields.get("context_parallel", 1)
    assert isinstance(gpus, int)
    assert isinstance(shared, int)
    if made_up:
        rollouts = keys.count("data.fake.batch_size") or MADE_UP
    rows = max(1, (rollouts or ROLLOUTS) * shared // gpus)
    found.fields["gradient_accumulation_steps"] = rows
    found.options["sync_each_batch"] = True
    if made_up:
        return
    found.notes.append(
        f"{rollouts or ROLLOUTS} rollouts of a step are counted as rows of their own, {rows} for each rank, an "
        "upper bound"
    )


ROLLOUTS = 128
"""``OrchestratorConfig.batch_size`` where neither it nor ``token_batch_size`` is given (configs/orchestrator.py)."""


MADE_UP = 2
"""``FakeDataLoaderConfig.batch_size`` (configs/trainer.py)."""


def _pieces(found: Found, chunk: int) -> int:
    """Pieces of so many tokens that a rank's row is cut into for the head."""
    tokens = 1
    for field in ("micro_batch_size", "seq_len"):
        value = found.fields[field]
        assert isinstance(value, int)
        tokens *= value
    ranks = found.fields.get("context_parallel", 1)
    assert isinstance(ranks, int)
    return max(1, -(-tokens // (ranks * chunk)))


def _merge_trainer(keys: Keys) -> None:
    """An ``rl`` file has the trainer's sections below ``trainer``, and shares some of its own."""
    for key in list(keys.values):
        inner = key.removeprefix("trainer.")
        if inner != key:
            keys.values[inner] = keys.values.pop(key)
    for shared in ("seq_len",):
        if shared in keys.values:
            keys.values.setdefault("model.seq_len", keys.values.pop(shared))


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object], *, is_rl: bool) -> None:
    if is_rl:
        length = keys.count("model.seq_len")
        keys.taken -= {"data.seq_len"}
    else:
        length = keys.count("data.seq_len")
    found.fields["seq_len"] = length
    micro = keys.count("data.micro_batch_size") or 1
    found.fields["micro_batch_size"] = micro
    found.fields["packing"] = "documents"
    nodes = keys.count("deployment.num_train_nodes") or 1
    on_each = keys.count("deployment.gpus_per_node") or 8
    kind = keys.text("deployment.type")
    single = keys.count("deployment.num_train_gpus") or 1
    found.fields["num_gpus"] = nodes * on_each if kind == "multi_node" else single
    if kind == "multi_node":
        found.fields["num_nodes"] = nodes
    if not is_rl:
        # ``trainer/sft/train.py``: batch_size x cp over the ranks, in micro-batches.
        gpus = given.get("num_gpus") or found.fields["num_gpus"]
        assert isinstance(gpus, int)
        whole = (keys.count("data.batch_size") or 1) * (keys.count("model.cp") or 1)
        found.fields["gradient_accumulation_steps"] = max(1, whole // (gpus * micro))
        # Nothing calls ``set_requires_gradient_sync``: FSDP2 reduces after each micro-batch.
        found.options["sync_each_batch"] = True


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
        found.options["states_leave"] = True  # trainer/optim/state_offload.py


def _read_context(keys: Keys, found: Found) -> None:
    """Ranks that share sequences: by heads (``ulysses``), or in a ring, as torch's is counted."""
    degree, style = keys.count("model.cp"), keys.text("model.cp_style") or "ring"
    if degree in (None, 1):
        return
    found.fields["context_parallel"] = degree
    if style == "ulysses":
        # Whole sequences of some heads, windows and recurrent layers too (``setup_model_cp``, src/prime_rl/utils/cp.py).
        found.fields["context_parallel_kind"] = "all-to-all"
        found.options["context_parallel_in_classes"] = True
        return
    found.fields |= {"attention": "sdpa", "packing": "none"}
    found.notes.append(
        "model.cp_style ring: ring-flash-attention is counted as torch's ring, over rows of one sequence"
    )


def _read_experts(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """``auto`` spreads a mixture's experts over up to 8 ranks (``resolve_ep``)."""
    degree = keys.take("model.ep")
    if degree == "auto":
        gpus = given.get("num_gpus") or found.fields["num_gpus"]
        replicas = found.options.get("data_parallel_replicate_degree", 1)
        assert isinstance(gpus, int)
        assert isinstance(replicas, int)
        degree = min(gpus // replicas, MOST_AUTO) if _has_plain_experts(found) else 1
    if isinstance(degree, int) and degree > 1:
        found.fields["expert_parallel"] = degree


MOST_AUTO = 8
"""Ranks over which ``ep`` spreads experts where it is ``auto``."""
_PLAIN_EXPERTS = frozenset({
    "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe",
})  # fmt: skip
"""Types whose experts can be spread here."""


def _has_plain_experts(found: Found) -> bool:
    return "adapter" not in found.fields and model_type(found.model) in _PLAIN_EXPERTS


def _read_optimizer(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """AdamW is fused unless its states go to the CPU; SGD has momentum; sign-SGD keeps nothing."""
    offloads = keys.flag("model.optim_cpu_offload")
    name, momentum = keys.text("optim.type"), keys.take("optim.momentum")
    if name == "sign_sgd":
        found.fields["optimizer"] = "sgd"
        found.notes.append("optim.type sign_sgd keeps no states: counted as sgd without momentum")
    elif name == "sgd":
        found.fields["optimizer"] = "sgd" if momentum == 0 else "sgd-momentum"
    else:
        form = "foreach" if offloads else "fused"
        add_named_optimizer(keys, "optim.type", found, given, form=form)


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
        # Of its base layer's own format (``trainer/models/layers/lora/multi_linear.py``).
        narrow = keys.text("model.optimization_dtype") == "bfloat16"
        found.fields["adapter"] = lora(
            rank=rank or 16, alpha=alpha, dropout=dropout, targets=names, modules_to_save=saved,
            dtype="bf16" if narrow else "fp32",
        )  # fmt: skip
    else:
        keys.taken -= {each for each in keys.taken if each.startswith("model.lora.")}
