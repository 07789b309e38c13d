"""NeMo AutoModel's YAML: Hugging Face models under FSDP2, components by their import paths.

NeMo's older files, of models written for Megatron, are another program's and are refused. Sections of
earlier AutoModels (``parallelizer``, ``autopipeline``, ``distributed_config``) are read as what they are today.
"""

from collections.abc import Mapping
from math import isqrt

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import (
    ANY_SIZE,
    given_text_alone,
    is_stored_wide,
    model_type,
)
from memplan.sources.stacks.of_nemo.kernels import read_kernels
from memplan.sources.stacks.of_nemo.sizes import read_gpus, read_length, read_sizes
from memplan.sources.stacks.of_nemo.tuning import (
    DTYPES,
    read_adapter,
    read_frozen,
    read_optimizer,
)

NAME = "NeMo AutoModel"
_STRATEGIES = {"fsdp2": "fsdp", "ddp": "ddp"}
_MANAGERS = {"FSDP2Manager": "fsdp2", "DDPManager": "ddp", "MegatronFSDPManager": "megatron_fsdp"}
"""Classes that earlier versions named in ``distributed._target_``."""
_DEGREES = {
    "distributed.tp_size": "tensor_parallel", "distributed.cp_size": "context_parallel",
    "distributed.pp_size": "pipeline_parallel", "distributed.ep_size": "expert_parallel",
}  # fmt: skip
_TEXTS = ("make_tulu3_dataset", "make_tulu3_magicoder_text_mix_dataset")
"""Texts alone that recipes for pictures are given (``components/datasets/vlm/datasets.py``)."""
_MOCKED = "build_mock_vlm_dataset"
_MOCKED_SIZE = (256, 256)
"""Pictures of noise, and their width and height (``components/datasets/vlm/mock.py``)."""
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TEXT_CLASS = "NeMoAutoModelForCausalLM"
_MIXED = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Types of which transformers 5.23 splits the linear attention too, and AutoModel, whose transformers is 5.12.1, does not
(``_parallelize_qwen3_5_vlm`` of components/distributed/optimized_tp_plans.py)."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether its recipe's sections are there, or an older NeMo's."""
    trainer, model = values.get("trainer"), values.get("model")
    is_older = isinstance(trainer, Mapping) and isinstance(model, Mapping) and (
        "micro_batch_size" in model or "megatron_amp_O2" in model
    )  # fmt: skip
    recipe = values.get("recipe")
    return "step_scheduler" in values or is_older or (
        isinstance(recipe, str) and "Recipe" in recipe
    ) or {"recipe", "recipe_args"} <= values.keys() or _generates(values)  # fmt: skip


def _generates(values: Mapping[str, object]) -> bool:
    """Whether it is of the program that makes pictures or videos (``examples/diffusion/generate``)."""
    return {"model", "inference", "vae"} <= values.keys()


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "nemo"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    if keys.has("trainer"):
        keys.refuse("trainer", "NeMo's Megatron models are not modelled; AutoModel's files are")
    if keys.has("vae"):
        keys.refuse("inference", "this file makes pictures or videos, and trains nothing")
    if keys.has("recipe_args"):
        keys.refuse(
            "recipe_args", "draft models for speculative decoding are not modelled; fine-tuning is"
        )
    found.model = _model(keys)
    found.fields["engine"] = _engine(keys)
    for key, field in _DEGREES.items():
        degree = keys.take(key)
        if isinstance(degree, int) and degree > 1:
            found.fields[field] = degree
    if keys.flag("distributed.sequence_parallel") and "tensor_parallel" in found.fields:
        found.fields["sequence_parallel"] = True
    read_gpus(keys, found, given)
    if (given.get("num_gpus") or found.fields.get("num_gpus")) == 1 and "engine" not in given:
        # ``fsdp2_sharding_enabled``: on one GPU nothing is sharded, nor cast as FSDP2 casts (``distributed/fsdp2.py``).
        found.fields["engine"] = "ddp"
    read_sizes(keys, found, given)
    _read_formats(keys, found)
    _read_sharding(keys, found, given)
    _read_checkpointing(keys, found)
    read_kernels(keys, found)
    read_length(keys, found, given)
    read_frozen(keys, found)
    _read_pictures(keys, found)
    _read_allocator(keys, found)
    read_optimizer(keys, found, given)
    read_adapter(keys, found)


def _read_pictures(keys: Keys, found: Found) -> None:
    """The most pixels that the processor makes of a picture, where the model takes any size; none of a text recipe's.

    A recipe's class says which collator there is (``recipes/llm``, ``recipes/vlm``), else the model's does.
    """
    recipe, target = keys.text("recipe"), (keys.text("model._target_") or "").split(".")
    data = keys.text("dataset._target_") or ""
    reads_text = "VLM" not in recipe if recipe is not None else _TEXT_CLASS in target
    reads_text = reads_text or ".datasets.llm." in data or data.endswith(_TEXTS)
    if reads_text:
        given_text_alone(found)
        return
    if data.endswith(_MOCKED):
        found.fields["images_per_sample"] = keys.count("dataset.num_images_per_sample") or 1
    pixels = _mocked_pixels(keys, data) or keys.count("processor.max_pixels")
    if pixels is not None and model_type(found.model) in ANY_SIZE:
        found.fields["image_size"] = isqrt(pixels)
        found.notes.append(
            f"pictures of {pixels} pixels each, as its processor or mock data have them"
        )


def _mocked_pixels(keys: Keys, data: str) -> int | None:
    """Pixels of each picture of noise (``components/datasets/vlm/mock.py``)."""
    if not data.endswith(_MOCKED):
        return None
    sides = keys.take("dataset.image_size") or _MOCKED_SIZE
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        keys.refuse("dataset.image_size", "write a width and a height")
    return int(sides[0]) * int(sides[1])


def _read_allocator(keys: Keys, found: Found) -> None:
    """Expandable segments, where the environment that the file gives asks for them."""
    for name in _ALLOCATORS:
        if "expandable_segments:true" in (keys.text(f"ci.env_vars.{name}") or "").lower():
            found.fields["allocator"] = "expandable"


def _model(keys: Keys) -> str | dict[str, object] | None:
    """A model by its name, or by the sizes of one of transformers' own configuration classes."""
    sizes = _sizes(keys)
    if sizes is not None:
        return sizes
    whole = keys.values.get("model.config")
    named = keys.text("model.config.pretrained_model_name_or_path")
    named = named or keys.text("model.config.name_or_path")
    if named is None and isinstance(whole, str):
        named = keys.text("model.config")
    return keys.model("model.pretrained_model_name_or_path") or named


def _sizes(keys: Keys) -> dict[str, object] | None:
    """What a configuration's class is called with; its module's folder has the type's name."""
    target = (keys.text("model.config._target_") or "").split(".")
    if target[:2] != ["transformers", "models"] or not keys.has("model.config.architectures"):
        return None
    config = keys.section("model.config") or {}
    del config["_target_"]
    return {"name": target[-1].removesuffix("Config").lower(), "model_type": target[2], **config}


def _engine(keys: Keys) -> object:
    """The strategy; earlier versions named a class instead."""
    manager = (keys.text("distributed._target_") or "").rpartition(".")[2]
    if manager in _MANAGERS and "distributed.strategy" not in keys.values:
        keys.values["distributed.strategy"] = _MANAGERS[manager]
    return keys.choice("distributed.strategy", _STRATEGIES)


def _read_formats(keys: Keys, found: Found) -> None:
    """Weights in ``torch_dtype``; FSDP2 computes in bf16 and reduces in fp32, DDP casts nothing.

    A pretrained checkpoint's fp32 weights stay fp32 whatever is asked for, and FSDP2 computes in it
    (``_transformers/model_init.py``, ``_restore_loaded_model_dtype``; ``distributed/parallelizer_utils.py``).
    """
    dtype = keys.choice("model.torch_dtype", DTYPES) or "bf16"
    compute = keys.choice("distributed.mp_policy.param_dtype", DTYPES) or "bf16"
    pretrained = str(keys.text("model._target_")).endswith("from_pretrained")
    if pretrained and is_stored_wide(found.model) and not keys.section("quantization"):
        dtype = compute = "fp32"
        found.notes.append(f"{found.model}: its checkpoint holds fp32 weights, which stay fp32")
    reduced = keys.choice("distributed.mp_policy.reduce_dtype", DTYPES) or "fp32"
    autocast = keys.on("distributed.autocast_dtype")
    if found.fields["engine"] == "fsdp":
        wide = "bf16-mixed" if compute == "bf16" else "fp32"
        found.fields["precision"] = "bf16" if dtype == "bf16" else wide
        found.options["reduce_dtype"] = reduced
        if autocast:
            found.options["autocast"] = True
    elif autocast:
        found.fields["precision"] = "bf16-autocast" if dtype == "bf16" else "bf16-amp"
    else:
        found.fields["precision"] = dtype
    if keys.flag("fp8.enabled"):
        recipe = keys.text("fp8.recipe_name") or "tensorwise"
        found.fields["fp8"] = f"torchao-{recipe.replace('_', '-')}"


def _read_sharding(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    offloads = keys.section("distributed.offload_policy")
    defers = keys.take("distributed.defer_fsdp_grad_sync")
    reshards = keys.take("distributed.reshard_after_forward")
    replicas = keys.take("distributed.dp_replicate_size")
    if (of_given(given, "engine") or found.fields["engine"]) != "fsdp":
        found.options.pop("reduce_dtype", None)
        return
    if "tensor_parallel" in found.fields and model_type(found.model) in _MIXED:
        found.options["tensor_parallel_leaves_mixers"] = True
    found.options["sync_each_batch"] = defers is False or _reduces_each_batch(keys, found)
    if offloads is not None:
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    by_experts = keys.flag("distributed.moe.reshard_after_forward")
    if reshards is False or ("expert_parallel" in found.fields and not by_experts):
        found.options["reshard_after_forward"] = False
    if isinstance(replicas, int) and replicas > 1:
        found.options["data_parallel_replicate_degree"] = replicas


def _reduces_each_batch(keys: Keys, found: Found) -> bool:
    """Whether nothing defers the reduction of a mixture's gradients.

    Where its outer model is no unit of FSDP's, neither ``get_sync_ctx`` nor torch's pipelines know it for one
    (``components/distributed/utils.py``); its own ``MoEFSDPSyncMixin`` does, if it is asked to.
    """
    outer, own = (
        keys.take("distributed.moe.wrap_outer_model"),
        keys.flag("model.backend.enable_fsdp_optimizations"),
    )
    return "expert_parallel" in found.fields and outer is False and not own


def _read_checkpointing(keys: Keys, found: Found) -> None:
    value = keys.take("distributed.activation_checkpointing")
    word = str(value).lower().replace("-", "_")
    if value in OFF or word in ("false", "off", "disabled", "no"):
        found.fields["checkpointing"] = "none"
    elif word in ("true", "on", "full", "enabled", "yes"):
        found.fields["checkpointing"] = "full"
    elif word == "selective":
        found.fields["checkpointing"] = "none"
        found.notes.append("activation_checkpointing selective is counted as none, an upper bound")
    else:
        keys.refuse("distributed.activation_checkpointing", "write true, false, full or selective")
