"""NeMo AutoModel's YAML: Hugging Face models under FSDP2, components by their import paths.

NeMo's older files, of models written for Megatron, are another program's and are refused. Sections of
earlier AutoModels (``parallelizer``, ``autopipeline``, ``distributed_config``) are read as what they are today.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import isqrt, lcm

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found, micro_batches, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import (
    ANY_SIZE,
    HEARING,
    given_text_alone,
    has_experts,
    is_stored_wide,
    model_type,
    num_layers,
)
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.wording import EVERY_LINEAR, lora
from memplan.training.setup_derived import GPUS_PER_NODE
from memplan.units import ceil_div

NAME = "NeMo AutoModel"

_STRATEGIES = {"fsdp2": "fsdp", "ddp": "ddp"}
_MANAGERS = {"FSDP2Manager": "fsdp2", "DDPManager": "ddp", "MegatronFSDPManager": "megatron_fsdp"}
"""Classes that earlier versions named in ``distributed._target_``."""
_LOSSES = {
    "MaskedCrossEntropy": None, "FusedLinearCrossEntropy": "cut", "ChunkedCrossEntropy": "unsloth",
    "TEParallelCrossEntropy": None,
}  # fmt: skip
"""``components/loss``: ``linear_ce.py`` calls cut-cross-entropy; ``chunked_ce.py`` keeps the logits in their own dtype and
makes a new tensor for their gradient, as Unsloth's does, a chunk of rows in fp32 at a time."""
_DEGREES = {
    "distributed.tp_size": "tensor_parallel", "distributed.cp_size": "context_parallel",
    "distributed.pp_size": "pipeline_parallel", "distributed.ep_size": "expert_parallel",
}  # fmt: skip
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3",
    "flash_attention_4": "flash", "te": "flash", "flex": "sdpa", "flex_attention": "sdpa",
    "tilelang": None, "cudnn": None, "torch": None,
}  # fmt: skip
"""``model.attn_implementation``, and ``model.backend.attn`` of AutoModel's own classes."""
_SPARSE = ("tilelang", "cudnn", "torch")
"""Attention of AutoModel's own for DeepSeek V4 and GLM's sparse layers (``BackendConfig``)."""
_NORMS = {"torch": "fused", "te": "fused", "quack": "fused", "torch_fp32": None}
"""``model.backend.rms_norm`` (``components/models/common/utils.py``): one kernel, or torch's own operations in fp32."""
_OTHER_KERNELS = {
    ("model.backend.rope", "quack"): "rotates in one kernel",
    ("model.backend.experts", "torch_mm_mxfp8"): "multiplies experts' matrices in 8 bits",
    ("model.backend.dispatcher", "mok"): "runs experts in one kernel",
}
"""Other values of ``BackendConfig`` than those that are modelled."""
_TEXTS = ("make_tulu3_dataset", "make_tulu3_magicoder_text_mix_dataset")
"""Texts alone that recipes for pictures are given (``components/datasets/vlm/datasets.py``)."""
_MOCKED = "build_mock_vlm_dataset"
_MOCKED_SIZE = (256, 256)
"""Pictures of noise, and their width and height (``components/datasets/vlm/mock.py``)."""
_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "auto": "bf16", "float32": "fp32", "fp32": "fp32",
    "torch.bfloat16": "bf16", "torch.float32": "fp32",
}  # fmt: skip
_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b",
    "interleaved_1f1b": "interleaved-1f1b", "loopedbfs": "looped-bfs", "looped_bfs": "looped-bfs",
    "zbvzerobubble": "zbv", "interleavedzerobubble": "interleaved-zero-bubble",
    "dualpipev": "dualpipev",
}  # fmt: skip
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TEXT_CLASS = "NeMoAutoModelForCausalLM"
_ONE_STAGE = ("1f1b", "gpipe")
_FREEZABLE = {
    "freeze_config.freeze_vision_tower": ("vision_tower",),
    "freeze_config.freeze_audio_tower": ("audio_tower",),
    "freeze_config.freeze_language_model": ("embeddings", "layers", "norm"),
    "freeze_config.freeze_embeddings": ("embeddings",),
}  # fmt: skip
"""What is frozen by each (``apply_parameter_freezing``: modules by words in their names)."""
_OWN_ATTENTION = ("gpt_oss", "mimo_v2_flash")
"""Types whose class in transformers has no other attention than eager."""
_FLASH = ("flash", "flash3")
_EXPERTS = "model.layers.0.mlp.experts"
"""What a mixture's experts are called, all of a layer (``apply_lora_to_linear_modules``)."""
_LENGTHS = (
    "dataset.seq_length", "dataset.seq_len", "dataset.max_length", "packed_sequence.max_length",
    "dataloader.collate_fn.max_length",
)  # fmt: skip
"""What sequences are cut to, or padded to (``recipes/_typed_config.py``)."""


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
    _read_gpus(keys, found, given)
    _read_sizes(keys, found, given)
    _read_formats(keys, found)
    _read_sharding(keys, found, given)
    _read_checkpointing(keys, found)
    _read_kernels(keys, found)
    _read_length(keys, found, given)
    _read_frozen(keys, found)
    _read_pictures(keys, found)
    _read_allocator(keys, found)
    _read_optimizer(keys, found, given)
    _read_adapter(keys, found)


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


# -- sizes -----------------------------------------------------------------------------------------


def _read_gpus(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """As many as ``dp_size`` and the degrees make, or as the nodes that the file names have."""
    shared = 1
    for field in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        shared *= _degree(found, field)
    ranks = keys.take("distributed.dp_size")
    nodes = keys.count("benchmark.num_nodes") or keys.count("ci.nodes")
    nodes, on_each = keys.count("nnodes") or nodes, keys.count("ci.nproc_per_node")
    on_each = keys.count("nproc_per_node") or on_each  # what a script's torchrun is told
    launched = _launched(keys)
    if launched is not None:
        nodes, on_each = launched
    if on_each is not None:
        nodes = nodes or 1
    on_each = on_each or (TRAY if _is_tray(keys.text("ci.cluster_tag")) else GPUS_PER_NODE)
    if given.get("num_gpus") is not None:
        return
    stages = _degree(found, "pipeline_parallel")
    fewest = stages * lcm(shared // stages, _degree(found, "expert_parallel"))
    if isinstance(ranks, int) and ranks > 0:
        found.fields["num_gpus"] = ranks * shared
    elif nodes is not None and not nodes * on_each % fewest:
        found.fields |= {"num_gpus": nodes * on_each, "num_nodes": nodes}
        nodes_words = "1 node" if nodes == 1 else f"{nodes} nodes"
        gpus_words = "1 GPU" if on_each == 1 else f"{on_each} GPUs"
        found.notes.append(f"{nodes_words} of {gpus_words}, unless you say others")
    elif fewest > 1:
        found.fields["num_gpus"] = fewest
        found.notes.append(
            f"{fewest} GPUs, the fewest that its degrees need, unless you say others"
        )


TRAY = 4
"""GPUs of a compute tray of NVIDIA's GB200 and GB300 NVL72, which is a node of theirs."""


def _is_tray(cluster: str | None) -> bool:
    return (cluster or "").lower().startswith("gb")


def _launched(keys: Keys) -> tuple[int, int] | None:
    """Nodes that SkyPilot is asked for, and the GPUs of each, ``H100:8`` (``components/launcher/skypilot``)."""
    nodes, cards = keys.count("skypilot.num_nodes"), keys.text("skypilot.accelerators")
    if not keys.has("skypilot"):
        return None
    count = (cards or "").rpartition(":")[2]
    return nodes or 1, int(count) if count.isdecimal() else 1


def _degree(found: Found, field: str) -> int:
    degree = found.fields.get(field, 1)
    assert isinstance(degree, int)
    return degree


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    local = keys.count("step_scheduler.local_batch_size") or 1
    whole = keys.count("step_scheduler.global_batch_size")
    found.fields["micro_batch_size"] = local
    gpus = given.get("num_gpus") or found.fields.get("num_gpus", 1)
    assert isinstance(gpus, int)
    for field in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        gpus = max(1, gpus // _degree(found, field))
    whole = local * gpus if whole is None else whole
    # ``components/training/step_scheduler.py`` raises
    batches = micro_batches(found, batch=whole, micro=local, ranks=gpus, stack=NAME)
    found.fields["gradient_accumulation_steps"] = batches
    if "pipeline_parallel" in found.fields:
        _read_pipeline(keys, found, local=local, batches=batches)


def _read_pipeline(keys: Keys, found: Found, *, local: int, batches: int) -> None:
    """Micro-batches are cut out of one local batch, and a run of the schedule takes it whole."""
    key = "distributed.pipeline.pp_microbatch_size"
    micro = keys.count(key) or 1
    count, rest = divmod(local, micro)
    if rest:
        keys.refuse(key, f"{local} sequences are no whole number of micro-batches of {micro}")
    found.fields |= {"micro_batch_size": micro, "gradient_accumulation_steps": count}
    if batches > 1:
        found.notes.append(
            f"a step is {batches} runs of the pipeline over {count} micro-batches each, of which one is counted"
        )
    schedule = (keys.text("distributed.pipeline.pp_schedule") or "1f1b").lower()
    if schedule not in _SCHEDULES:
        keys.refuse("distributed.pipeline.pp_schedule", f"{schedule!r:.40} is not modelled")
    found.fields["pipeline_schedule"] = _SCHEDULES[schedule]
    each = keys.count("distributed.pipeline.layers_per_stage")
    rounded = keys.text("distributed.pipeline.round_virtual_stages_to_pp_multiple")
    if schedule not in _ONE_STAGE:
        found.fields["virtual_stages"] = _virtual_stages(keys, found, each=each, rounded=rounded)


def _virtual_stages(keys: Keys, found: Found, *, each: int | None, rounded: str | None) -> int:
    """Stages of a rank (``calculate_virtual_stages``): as many layers as said make one."""
    if each is None:
        return 2
    layers = None if found.model is None else num_layers(found.model)
    ranks = _degree(found, "pipeline_parallel")
    if layers is None:
        found.notes.append(
            "layers_per_stage: the model is not known here: counted as 2 stages a rank"
        )
        return 2
    stages = -(-layers // each)
    if stages % ranks and rounded is None:
        keys.refuse(
            "distributed.pipeline.layers_per_stage",
            f"{layers} layers are {stages} stages, no multiple of pp_size {ranks}",
        )
    stages += ranks - stages % ranks if rounded == "up" and stages % ranks else -(stages % ranks)
    return max(2, stages // ranks)


def _read_length(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    sizes = [keys.take(f"packed_sequence.{name}") for name in ("packed_sequence_size", "pack_size")]
    packed = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    length = None
    for name in _LENGTHS:
        value = keys.take(name)
        length = length or (value if isinstance(value, int) and value > 0 else None)
    if keys.has(
        "dataset.max_sentence_len"
    ):  # and a mark of its end (``components/datasets/llm/mock.py``)
        length = (keys.count("dataset.max_sentence_len") or 0) + 1
    padded = keys.count("packed_sequence.collate_max_length")
    multiple = keys.count("dataloader.collate_fn.pad_seq_len_divisible") or 1
    if packed is None and length is not None:
        length = ceil_div(length, multiple) * multiple
    if packed is not None:
        found.fields["packing"] = "documents"
        length = padded or packed
        own = "model.backend.attn" in keys.values
        if sizes[0] == packed and not own and found.fields.get("attention") not in _FLASH:
            # ``_apply_preload_overrides``: rows of several documents go through flash attention alone.
            found.fields["attention"] = "flash"
    found.fields["seq_len"] = length
    if length is None and "seq_len" not in given:
        found.notes.append("dataset.seq_length is not set: sequences are not cut; give a length")


# -- the model and its engine ----------------------------------------------------------------------


def _read_formats(keys: Keys, found: Found) -> None:
    """Weights in ``torch_dtype``; FSDP2 computes in bf16 and reduces in fp32, DDP casts nothing.

    A pretrained checkpoint's fp32 weights stay fp32 whatever is asked for, and FSDP2 computes in it
    (``_transformers/model_init.py``, ``_restore_loaded_model_dtype``; ``distributed/parallelizer_utils.py``).
    """
    dtype = keys.choice("model.torch_dtype", _DTYPES) or "bf16"
    compute = keys.choice("distributed.mp_policy.param_dtype", _DTYPES) or "bf16"
    pretrained = str(keys.text("model._target_")).endswith("from_pretrained")
    if pretrained and is_stored_wide(found.model) and not keys.section("quantization"):
        dtype = compute = "fp32"
        found.notes.append(f"{found.model}: its checkpoint holds fp32 weights, which stay fp32")
    reduced = keys.choice("distributed.mp_policy.reduce_dtype", _DTYPES) or "fp32"
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


def _read_own_loss(found: Found) -> None:
    """Transformer Engine's loss: the logits, in their own dtype, become their gradient (``te_parallel_ce.py``)."""
    if found.fields.get("tensor_parallel") in (None, 1):
        found.fields["loss"] = "flash_attn"
    else:
        found.notes.append(
            "loss_fn: Transformer Engine's keeps the logits alone, which is not modelled beside "
            "tensor_parallel: the figures are upper bounds"
        )


def _read_kernels(keys: Keys, found: Found) -> None:
    for (key, value), what in _OTHER_KERNELS.items():
        if keys.text(key) == value:
            found.notes.append(
                f"{key} {value} {what}, which is not modelled: the figures are upper bounds"
            )
    if keys.choice("model.backend.rms_norm", _NORMS) is not None:
        found.fields["norm"] = _NORMS[str(keys.text("model.backend.rms_norm"))]
    own = keys.choice("model.backend.attn", _ATTENTION)
    if keys.text("model.backend.attn") in _SPARSE:
        found.notes.append(
            f"model.backend.attn {keys.text('model.backend.attn')} attends in kernels of AutoModel's own, which are not "
            "modelled: the figures are upper bounds"
        )
    found.fields["attention"] = keys.choice("model.attn_implementation", _ATTENTION) or own
    if model_type(found.model) in _OWN_ATTENTION and found.fields["attention"] not in (
        None,
        "eager",
    ):
        found.fields["attention"] = None
        found.notes.append(
            "AutoModel's own class runs attention with sinks in a kernel; transformers' class, which is counted, "
            "has eager alone"
        )
    _read_compilation(keys, found)
    _read_routing(keys, found)
    loss = (keys.text("loss_fn._target_") or "").rpartition(".")[2]
    if _LOSSES.get(loss):
        found.fields["loss"] = _LOSSES[loss]
    elif loss == "MaskedCrossEntropy" and keys.take("loss_fn.fp32_upcast") is False:
        found.fields["loss"] = "uncast"
    elif loss == "TEParallelCrossEntropy":
        _read_own_loss(found)
    if keys.section("model.backend.te_fp8"):
        found.notes.append("model.backend.te_fp8: linear layers of Transformer Engine in 8 bits")
        found.fields["fp8"] = "te-delayed"


def _read_routing(keys: Keys, found: Found) -> None:
    """A router of a benchmark's gives each expert as many tokens, unless noise is asked for (``FakeBalancedGate``)."""
    balanced, noise = (
        keys.flag("model.backend.fake_balanced_gate"),
        keys.number("model.backend.fake_gate_noise"),
    )
    gathers = keys.text("model.backend.dispatcher") == "torch"
    if "expert_parallel" not in found.fields:
        return
    if balanced and not noise:
        found.fields["expert_imbalance"] = 1
    if gathers:
        found.left_out.append(
            "model.backend.dispatcher torch (the tokens of all ranks, which each gathers)"
        )


def _read_compilation(keys: Keys, found: Found) -> None:
    """The model without its loss, which is called apart, and cut at every unit by the hooks that gather it
    (``components/utils/compile_utils.py``): layer by layer is nearest."""
    asked = [keys.flag("compile.enabled"), keys.flag("distributed.enable_compile")]
    found.fields["compile"] = "layer" if any(asked) else "none"
    if asked[0]:
        found.notes.append(
            "compile.enabled leaves the loss eager: counted as each layer compiled by itself"
        )


def _read_frozen(keys: Keys, found: Found) -> None:
    """The section's own default freezes what sees (``freeze_vision_tower``, true)."""
    parts: list[str] = []
    is_there = keys.has("freeze_config")
    for key, names in _FREEZABLE.items():
        if is_there and keys.flag(key) and (names != ("audio_tower",) or _hears(found)):
            parts += names
    if is_there and keys.flag("freeze_config.freeze_embeddings"):
        # ``apply_parameter_freezing`` lost it with 73cd446e9.
        found.notes.append(
            "freeze_config.freeze_embeddings: AutoModel has not read it since February 2026 and trains embeddings "
            "then; they are counted as frozen, as the file says"
        )
    if parts and not keys.has("peft"):
        found.fields["freeze"] = ",".join(dict.fromkeys(parts))


def _hears(found: Found) -> bool:
    """Whether the model is known to have an audio tower: of one that has none there is none to freeze."""
    return model_type(found.model) in HEARING


def _read_optimizer(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    form = "fused" if keys.flag("optimizer.fused") else "foreach"
    if keys.values.get("optimizer.foreach") is False and form != "fused":
        form = "loop"
    keys.used.add("optimizer.foreach")
    add_named_optimizer(keys, "optimizer._target_", found, given, form=form)
    if found.fields.get("optimizer") is not None and keys.has("optimizer.master_weights"):
        _read_masters(keys, found)


def _read_masters(keys: Keys, found: Found) -> None:
    """Transformer Engine's own: weights in fp32 beside the model's, or the bits that those lack."""
    options: dict[str, object] = {"master_weights": keys.flag("optimizer.master_weights")}
    if keys.flag("optimizer.store_param_remainders"):
        options["store_param_remainders"] = True
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = keys.choice(f"optimizer.{name}", _DTYPES)
        if dtype is not None:
            options[name] = dtype
    if str(getattr(found.fields["optimizer"], "value", "")) == "te-adamw":
        found.fields["optimizer_options"] = options


# -- adapters --------------------------------------------------------------------------------------


def _read_adapter(keys: Keys, found: Found) -> None:
    rank, alpha = keys.count("peft.dim"), keys.number("peft.alpha")
    dropout, names = keys.number("peft.dropout"), keys.names("peft.target_modules")
    excluded = keys.names("peft.exclude_modules")
    linear = keys.flag("peft.match_all_linear")
    dtype = keys.choice("peft.lora_dtype", _DTYPES)
    dora = keys.flag("peft.use_dora")
    if keys.has("peft"):
        found.fields["adapter"] = lora(
            rank=rank or 8, alpha=alpha, dropout=dropout, dora=dora,
            dtype=str(dtype or found.fields["precision"])[:4],
            targets=_targets(names, excluded=excluded, linear=linear),
            exclude=_pattern(excluded) if excluded else (),
        )  # fmt: skip
        if any(fnmatchcase(_EXPERTS, name) for name in names) and has_experts(found.model):
            found.left_out.append(
                "peft.target_modules (adapters of experts, which AutoModel's own classes of mixtures have)"
            )
    else:
        keys.taken -= {each for each in keys.taken if each.startswith("peft.")}
    if keys.has("quantization"):
        if keys.flag("quantization.load_in_4bit"):
            found.fields["quantize"] = keys.text("quantization.bnb_4bit_quant_type") or "nf4"
            found.quantization["double_quant"] = keys.flag("quantization.bnb_4bit_use_double_quant")
        elif keys.flag("quantization.load_in_8bit"):
            found.fields["quantize"] = "int8"


def _targets(
    names: tuple[str, ...], *, excluded: tuple[str, ...], linear: bool
) -> tuple[str, ...] | str:
    """What ``ModuleMatcher`` takes: every linear layer; all but some; or those named."""
    if linear or "*" in names or (excluded and not names):
        return EVERY_LINEAR
    return _pattern(names or ("*_proj",))


def _pattern(names: tuple[str, ...]) -> tuple[str, ...] | str:
    """Names of modules; with wildcards one pattern for all.

    >>> _pattern(("*.q_proj", "*mlp*"))
    '(.*[.]q_proj)|(.*mlp.*)'
    """
    if not any("*" in name for name in names):
        return names
    parts = (name.replace(".", "[.]").replace("*", ".*") for name in names)
    return "|".join(f"({part})" for part in parts)
