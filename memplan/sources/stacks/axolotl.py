"""axolotl's YAML: keys of its own, of which it makes training arguments (``core/builders/base.py``).

Weights are loaded in the compute dtype (``utils/config/__init__.py``, ``resolve_dtype``), so that with
``bf16`` a single GPU and DDP train bf16 weights under autocast; accelerate's FSDP casts shards to fp32.
"""

import re
from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.arguments import add_optimizer, pass_arguments
from memplan.sources.stacks.common.found import DeviceMap, Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import classifying, given_text_alone, model_type
from memplan.sources.stacks.common.wording import lora
from memplan.sources.stacks.shipped import point_at_shipped
from memplan.sources.trainer.keys import trl_job
from memplan.sources.trainer.launch import Loading
from memplan.training.adapters import LINEAR_NAMES
from memplan.training.freezing import ALL_BUT
from memplan.training.setup_derived import GPUS_PER_NODE
from memplan.units import ceil_div

NAME = "axolotl"

_JOBS = {
    "dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "grpo": "grpo",
    "gdpo": "grpo", "ebft": None,
}  # fmt: skip
_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash3", "flash_attention_4": "flash",
    "xformers": "flash", "sdpa": "sdpa", "eager": "eager", "flex_attention": "sdpa", "sage": "flash",
    "s2": "flash", "kernels-community/vllm-flash-attn3": "flash3", "kernels-community/flash-attn3": "flash",
}  # fmt: skip
_FLAGS = {
    "flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager",
    "xformers_attention": "flash", "sage_attention": "flash", "flex_attention": "sdpa",
}  # fmt: skip
"""Older spellings: one switch for each kernel."""
_DEGREES = {
    "tensor_parallel_size": "tensor_parallel", "context_parallel_size": "context_parallel",
}  # fmt: skip
_LIGER = {
    "liger_rope": ("rotary", "liger"), "liger_rms_norm": ("norm", "liger"),
    "liger_glu_activation": ("mlp", "fused"), "liger_cross_entropy": ("loss", "liger"),
    "liger_fused_linear_cross_entropy": ("loss", "fused_linear"),
}  # fmt: skip


_GENERATION = (
    "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "beta",
    "max_completion_length",
)  # fmt: skip
"""Keys of ``trl`` that a job goes by."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether it names a base model."""
    return "base_model" in values


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "axolotl"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    found.model = keys.model("base_model")
    if keys.text("processor_type") is None:
        given_text_alone(found)  # core/builders/causal.py: its collator is text's
    if keys.flag("use_ray"):
        _read_workers(keys, found)
    _read_sizes(keys, found, given)
    _read_precision(keys, found)
    _read_checkpointing(keys, found)
    _read_attention(keys, found)
    _read_ring(keys, found)
    _read_kernels(keys, found)
    _read_tuning(keys, found)
    _read_unfrozen(keys, found)
    _read_engine(keys, found, given)
    _read_job(keys, found)
    _read_evaluation(keys, found)
    _read_preparation(found, given)
    add_optimizer(keys, "optimizer", found, given)
    keys.used |= {"batch_size", "plugins"}
    if keys.flag("model_quantization_config_kwargs.dequantize"):  # then it is loaded in 16 bits
        keys.used.add("model_quantization_config")
    rank = keys.count("qgalore_rank")
    if rank is not None:
        found.fields["optimizer_options"] = {"rank": rank}
    pass_arguments(keys, found, given)


def _read_unfrozen(keys: Keys, found: Found) -> None:
    """Parameters that alone are trained, by patterns in which dots are dots and ``[:32000]`` names rows, whose gradients
    alone are kept (``utils/freeze.py``); beside an adapter all of the model is frozen anyway."""
    patterns = keys.names("unfrozen_parameters")
    if patterns and "adapter" not in found.fields:
        rows = re.compile(r"\[\d*:\d*\]$")
        named = (rows.sub("", each).replace(".", "[.]") for each in patterns)
        found.fields["freeze"] = ALL_BUT + " ".join(named)


def _read_workers(keys: Keys, found: Found) -> None:
    """Ray starts as many workers as it is told, each with a GPU (``cli/train.py``)."""
    workers = keys.count("ray_num_workers")
    if workers is not None:
        found.fields["num_gpus"] = workers


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    micro = keys.count("micro_batch_size") or 1
    steps = keys.count("gradient_accumulation_steps") or 1
    whole = keys.count("batch_size")
    if whole is not None and "gradient_accumulation_steps" not in keys.values:
        steps = max(1, whole // micro)
    found.arguments["per_device_train_batch_size"] = micro
    found.arguments["gradient_accumulation_steps"] = steps
    length = keys.count("sequence_len")
    packed = keys.flag("sample_packing")
    keys.used.add("pad_to_sequence_len")
    if packed:
        found.fields["packing"] = "documents"
    elif keys.flag("batch_flattening"):
        found.fields["packing"] = "padding_free"
    found.fields["seq_len"] = length
    bound = "as packing makes it" if packed else "an upper bound"
    if "seq_len" not in given:
        found.notes.append(
            f"sequence_len {length} is taken for the length of every sequence, {bound}"
        )


def _read_precision(keys: Keys, found: Found) -> None:
    """``bf16`` and ``fp16`` ask for autocast, ``full`` for none; all of them, and the other two, for weights of two bytes.

    ``utils/config/__init__.py``, ``resolve_dtype``: ``auto`` is bf16 on a card that has it.
    """
    half = keys.take("bf16")
    if half not in (True, False, None, "auto", "full", "true", "false"):
        keys.refuse("bf16", f"write auto, full, true or false, not {half!r:.40}")
    fp16, float16, bfloat16 = (keys.flag(key) for key in ("fp16", "float16", "bfloat16"))
    is_bf16 = half in (True, "auto", "full", "true") and not (fp16 and half == "auto")
    found.arguments["bf16"] = is_bf16 and half != "full"
    found.arguments["fp16"] = fp16 and not is_bf16
    if (fp16 or float16) and not (is_bf16 or bfloat16):
        found.notes.append("weights in fp16 are counted as in bf16: as many bytes")
    if keys.on("fp8"):
        found.fields["fp8"] = "torchao-tensorwise"
    found.loading = Loading(half_weights=is_bf16 or bfloat16 or fp16 or float16)


def _read_checkpointing(keys: Keys, found: Found) -> None:
    value = keys.take("gradient_checkpointing")
    how = keys.section("gradient_checkpointing_kwargs")
    if how is not None:
        found.arguments["gradient_checkpointing_kwargs"] = how
    if isinstance(value, str) and value not in (
        "offload",
        "offload_disk",
        "unsloth",
        "true",
        "false",
    ):
        keys.refuse("gradient_checkpointing", f"write true, false or offload, not {value!r:.40}")
    is_on = value not in OFF and value != "false"
    if _read_offloading(keys, found, value) and keys.values.get("adapter") not in OFF:
        # TRL's hooks take the place of recomputation (loaders/model.py, ``_apply_activation_checkpointing``).
        is_on = False
    found.arguments["gradient_checkpointing"] = is_on


_OFFLOADING = {
    True: "streamed", "true": "streamed", "disk": "streamed", "offload_disk": "streamed",
    "legacy": "blocking", "hidden_states": "checkpoints", "unsloth": "checkpoints",
}  # fmt: skip
"""By the value of ``activation_offloading``; nothing goes to a disk any more."""


def _read_offloading(keys: Keys, found: Found, checkpointing: object) -> bool:
    """What goes to CPU RAM; whether TRL's hooks take it.

    ``gradient_checkpointing: offload`` and ``offload_disk`` are older names (axolotl 0.19,
    utils/schemas/validation.py, core/trainers/mixins/activation_checkpointing.py).
    """
    value = keys.take("activation_offloading")
    if checkpointing == "offload":
        value = True
    elif checkpointing in ("unsloth", "offload_disk"):
        value = checkpointing
    if value in OFF:
        return False
    how = _OFFLOADING.get(value) if isinstance(value, str | bool) else None
    if how is None:
        keys.refuse(
            "activation_offloading", f"write true, legacy, disk or hidden_states, not {value!r:.40}"
        )
    found.fields["offload_activations"] = how
    return how != "checkpoints"


def _read_attention(keys: Keys, found: Found) -> None:
    named = keys.choice("attn_implementation", _ATTENTION)
    for key, kernel in _FLAGS.items():
        if keys.flag(key):
            named = named or kernel
            if key == "flex_attention":
                found.notes.append(f"{key} is counted as sdpa")
    if keys.text("attn_implementation") == "flex_attention":
        found.notes.append("attn_implementation flex_attention is counted as sdpa")
    if named is not None:
        found.fields["attention"] = named


def _read_ring(keys: Keys, found: Found) -> None:
    """ring-flash-attn in the place of flash-attention: every rank has a share of each document, and is told where they begin
    (``monkeypatch/ring_attn/patch.py``, ``update_ring_attn_params``)."""
    if (keys.count("context_parallel_size") or 1) == 1:
        return
    if keys.has("deepspeed") and keys.values.get("deepspeed", True) not in OFF:
        found.fields["context_parallel_kind"] = "ring"  # where Ulysses is DeepSpeed's own
    if found.fields.pop("packing", None) is not None:
        length = keys.count("sequence_len")
        found.notes.append(
            f"sample_packing beside context_parallel_size: counted as one sequence of {length} tokens"
        )
    if found.fields.get("attention") in ("flash", "flash3"):
        found.fields["attention"] = None
        found.left_out.append(
            "context_parallel_size (what ring-flash-attn gathers of keys and values; torch's ring is counted)"
        )


def _read_kernels(keys: Keys, found: Found) -> None:
    """Liger's and others' kernels, each with a switch of its own."""
    for key, (field, kernel) in _LIGER.items():
        if keys.flag(key):
            found.fields[field] = kernel
    plugins = keys.take("plugins")
    named = [str(each) for each in plugins] if isinstance(plugins, list) else []
    cut = keys.take("cut_cross_entropy")
    if cut is True or (cut is None and any("CutCrossEntropy" in each for each in named)):
        found.fields["loss"] = "cut"
    _read_tiles(keys, found)


TILE_TOKENS = 32768
"""Tokens of a tile where no number of them is given (``monkeypatch/tiled_mlp/patch.py``)."""


def _read_tiles(keys: Keys, found: Found) -> None:
    """ALST's tiled network: DeepSpeed's own under its engine, which has the same tiles elsewhere."""
    count = keys.count("tiled_mlp_num_shards")
    if not keys.flag("tiled_mlp"):
        return
    degree = keys.count("context_parallel_size") or 1
    length = keys.count("sequence_len") or 1
    found.fields["mlp_tiles"] = count or max(1, ceil_div(ceil_div(length, degree), TILE_TOKENS))


def _read_tuning(keys: Keys, found: Found) -> None:
    """Adapters and the base that they stand on."""
    kind = keys.choice("adapter", {"lora": "lora", "qlora": "lora"})
    four = keys.flag("load_in_4bit") or keys.text("adapter") == "qlora"
    if four and not keys.has("load_in_4bit") and keys.flag("gptq"):
        four = False
    if four:
        options = keys.section("bnb_config_kwargs") or {}
        found.fields["quantize"] = options.get("bnb_4bit_quant_type", "nf4")
        found.quantization["double_quant"] = options.get("bnb_4bit_use_double_quant", True)
    elif keys.flag("load_in_8bit"):
        found.fields["quantize"] = "int8"
    elif keys.flag("gptq"):
        found.fields["quantize"] = "gptq"
    if kind is None:
        return
    linear = keys.flag("lora_target_linear")
    names = keys.take("lora_target_modules")
    adapter = lora(
        rank=keys.count("lora_r") or 8,
        alpha=keys.number("lora_alpha"),
        dropout=keys.number("lora_dropout"),
        targets=LINEAR_NAMES if linear else _targets(keys, names),
        parameters=keys.names("lora_target_parameters"),
        modules_to_save=keys.names("lora_modules_to_save"),
        rslora=keys.flag("peft_use_rslora"),
        dora=keys.flag("peft_use_dora"),
        layers=_layers(keys),
        dtype="bf16" if keys.take("peft_autocast_adapter_dtype") is False else "fp32",
    )
    if keys.has("lora_target_parameters") and not (linear or names):
        settings = adapter["lora"]
        assert isinstance(settings, dict)
        # An empty list, which is not left to peft's own targets (loaders/adapter.py).
        settings["targets"] = ()
    found.fields["adapter"] = adapter


_STAYING_FP32 = frozenset({"gpt2", "gptj", "gpt_neo", "gpt_bigcode", "mpt", "bloom", "codegen"})
"""Types whose embedding goes by a name that is not cast back (``loaders/utils.py``, ``get_linear_embedding_layers``)."""


def _read_preparation(found: Found, given: Mapping[str, object]) -> None:
    """peft's preparation casts all that is not packed to fp32; axolotl casts norms and embeddings back, by their names.

    ``loaders/model.py``, ``_configure_embedding_dtypes``; not under FSDP and ZeRO-3. Where the embedding stays, the
    residual stream is in fp32; of the output matrix, which is cast back there too, this is an upper bound.
    """
    is_alone = not found.arguments.keys() & {"fsdp", "deepspeed"} and given.get("engine") is None
    packed = found.fields.get("quantize") not in (None, "none", "gptq")
    if (
        "adapter" in found.fields
        and packed
        and is_alone
        and model_type(found.model) in _STAYING_FP32
    ):
        found.quantization["prepare_for_kbit"] = True


def _targets(keys: Keys, names: object) -> tuple[str, ...] | str | None:
    if isinstance(names, str):
        return names
    return keys.names("lora_target_modules") or None


def _read_evaluation(keys: Keys, found: Found) -> None:
    """As axolotl makes arguments of it, without ``compute_metrics`` (``core/builders/base.py``, ``causal.py``).

    Where nothing says how often, there is none; the cache is emptied after as many batches as are added up.
    """
    has_set = keys.on("val_set_size") or keys.on("test_datasets")
    asked = [keys.on(key) for key in ("eval_steps", "evals_per_epoch", "eval_strategy")]
    size = keys.count("eval_batch_size") or found.arguments["per_device_train_batch_size"]
    if not has_set or not any(asked):
        return
    found.arguments |= {
        "eval_strategy": "steps",
        "per_device_eval_batch_size": size,
        "eval_accumulation_steps": found.arguments["gradient_accumulation_steps"],
        "prediction_loss_only": True,
    }


def _layers(keys: Keys) -> tuple[int, ...]:
    """Numbers of the layers that are adapted."""
    value = keys.take("peft_layers_to_transform")
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers):
        keys.refuse("peft_layers_to_transform", "write numbers of layers")
    return tuple(numbers)


def _read_engine(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    point_at_shipped(keys, "deepspeed", "axolotl")
    # utils/config/__init__.py, ``choose_device``; none where accelerate's launcher was given an engine.
    found.device_map = DeviceMap.REPLICAS
    config = keys.section("fsdp_config")
    listed = keys.take("fsdp")
    version = keys.count("fsdp_version")
    if config is not None or listed not in OFF:
        config = dict(config or {})
        if version is not None:
            config.setdefault("fsdp_version", version)
        elif not {"version", "fsdp_version"} & config.keys() and given.get("engine") is None:
            # ``check_fsdp_version_in_fsdp_config`` pins what transformers today has as 2.
            config["fsdp_version"] = 1
            found.notes.append("fsdp_version is not set: FSDP1, axolotl's default")
        config.pop("cpu_offload_pin_memory", None)
        config.pop("fsdp_cpu_offload_pin_memory", None)
        config.pop("mixed_precision_policy", None)
        for name in ("final_state_dict_type", "fsdp_final_state_dict_type"):
            config.pop(name, None)
        found.arguments["fsdp"] = listed if listed not in OFF else True
        found.arguments["fsdp_config"] = config
    for key, field in _DEGREES.items():
        degree = keys.count(key)
        if degree not in (None, 1):
            found.fields[field] = degree
    experts = keys.count("expert_parallel_size") or 1
    if experts > 1:
        # integrations/expert_parallel/plugin.py: experts are sharded over ``dp_shard``, the rest over all ranks.
        if "fsdp" not in found.arguments:
            keys.refuse(
                "expert_parallel_size",
                "experts spread over whole replicas are not modelled; beside FSDP2 they are",
            )
        found.fields["expert_parallel"] = experts
    replicas, shards = keys.count("dp_replicate_size"), keys.count("dp_shard_size")
    if (
        "fsdp" in found.arguments
        and given.get("num_gpus") is None
        and "num_gpus" not in found.fields
    ):
        _count_gpus(keys, found, (replicas or 1) * (shards or 0) * experts)
    if replicas not in (None, 1):
        found.options["data_parallel_replicate_degree"] = replicas
        found.notes.append(f"dp_replicate_size {replicas} x dp_shard_size {shards or 'the rest'}")


def _count_gpus(keys: Keys, found: Found, sharded: int) -> None:
    """As many GPUs as the degrees need, or a node: FSDP is for several, and a file says no number."""
    degrees = [keys.count(key) or 1 for key in _DEGREES]
    needed = (sharded or 1) * degrees[0] * degrees[1]
    count = needed if sharded else max(GPUS_PER_NODE, needed)
    found.fields["num_gpus"] = count
    found.notes.append(f"GPUs that FSDP shards over: {count}, unless you say others")


_CLASSIFYING = ("ForSequenceClassification", "ForTokenClassification")


def _read_head(keys: Keys, found: Found) -> None:
    """A class of transformers' with classes instead of a vocabulary; a process reward model labels tokens.

    ``core/builders/causal.py``: TRL's ``PRMTrainer`` takes single sequences.
    """
    labels = keys.count("num_labels")
    labels_tokens = keys.flag("process_reward_model")
    named = (keys.text("model_type") or "").removeprefix("AutoModel")
    head = "ForTokenClassification" if labels_tokens else named
    if head not in _CLASSIFYING:
        return
    model = classifying(found.model, head=head, num_labels=labels or 2)
    if model is None:
        found.notes.append(
            f"model_type AutoModel{head}: give the task, and how many labels there are"
        )
    else:
        found.model = model


VLLM_SHARE = 0.9
"""``VllmConfig.gpu_memory_utilization``, handed on where vLLM shares the GPUs (``core/trainers/grpo/__init__.py``); its other
keys are of ``axolotl vllm-serve``, on GPUs of its own."""


def _read_job(keys: Keys, found: Found) -> None:
    job = keys.choice("rl", _JOBS)
    if keys.flag("reward_model"):
        job = "reward"
        keys.used |= {"model_type", "num_labels"}
    else:
        _read_head(keys, found)
    trl = {name: keys.take(f"trl.{name}") for name in _GENERATION if keys.has(f"trl.{name}")}
    if keys.text("trl.vllm_mode") == "colocate":
        share = keys.number("vllm.gpu_memory_utilization") or VLLM_SHARE
        trl.setdefault("vllm_gpu_memory_utilization", share)
    precomputed = keys.flag("precompute_ref_log_probs")
    if job == "grpo":
        has_adapter = keys.values.get("adapter") not in OFF
        found.fields["job"] = trl_job("GRPOConfig", trl, has_adapter=has_adapter)
    elif job in ("dpo", "kto") and precomputed:
        found.fields["job"] = {"kind": job, "reference": "precomputed"}
    elif job is not None:
        found.fields["job"] = job
