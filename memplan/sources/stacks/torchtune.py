"""torchtune's YAML: components by their import paths, and the recipe's own keys.

A recipe is named on the command line and not in its file: on several GPUs the distributed ones run, with
FSDP2, else the single-device ones. ``dtype: bf16`` is bf16 everywhere, without autocast.
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import given_text_alone, torchtune_model
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.torchtune_sizes import torchtune_config
from memplan.sources.stacks.common.wording import lora
from memplan.training.freezing import ALL_BUT
from memplan.training.setup_derived import GPUS_PER_NODE

NAME = "torchtune"

_PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "bfloat16": "bf16", "float32": "fp32"}
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_JOBS = {
    "DPOLoss": "dpo", "RSOLoss": "dpo", "SimPOLoss": "simpo", "PPOLoss": "ppo",
    "GRPOSimpleLoss": "grpo", "GRPOLoss": "grpo", "GRPOCompletionLoss": "grpo",
}  # fmt: skip
_PARTS = {
    "model.encoder_trainable": (True, "model[.]vision_model model[.]multi_modal_projector"),
    "model.fusion_trainable": (True, "model[.]language_model[.]layers[.][0-9]*[38][.]"),
    "model.decoder_trainable": (
        False,
        "model[.]language_model[.](embed_tokens|norm) model[.]language_model[.]layers[.][0-9]*[0124-79][.] lm_head",
    ),
}
"""Parts of Llama 3.2 Vision, whether they are trained where nothing is said, and what the parameters of each begin with:
every fifth layer attends to the picture (``models/llama3_2_vision/_model_builders.py``, ``DeepFusionModel``)."""
_VISION = "llama3_2_vision"
_CHUNKED = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
_DEGREES = {
    "tensor_parallel_dim": "tensor_parallel", "context_parallel_dim": "context_parallel",
}  # fmt: skip


_DISTRIBUTED = (
    "fsdp_cpu_offload", "custom_sharded_layers", "fsdp_reshard_after_forward", "tensor_parallel_plan",
    *_DEGREES, "data_parallel_shard_dim", "data_parallel_replicate_dim", "ac_mode",
    "memory_efficient_fsdp_wrap",
)  # fmt: skip
"""Keys that the recipes for several GPUs have alone."""
_ALONE = ("single_device", "low_memory")
"""What names of torchtune's own files for one GPU end in."""
_OWN_FILES = "recipes/configs/"


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether components of torchtune's stand in it."""
    parts = [part for part in values.values() if isinstance(part, Mapping)]
    named = [str(part.get("_component_", "")) for part in parts]
    return any(name.startswith("torchtune.") for name in named)


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "torchtune"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    component = keys.text("model._component_")
    if keys.has("quantizer") and not keys.has("dataset"):
        keys.refuse("quantizer", "this file quantizes a model, and trains none")
    if component is None:
        if keys.values and not keys.has("policy_model"):  # which its table refuses
            keys.refuse("model._component_", "is missing: this file trains no model of torchtune's")
    else:
        _read_model(keys, found, component)
    found.fields["micro_batch_size"] = keys.count("batch_size") or 1
    found.fields["gradient_accumulation_steps"] = keys.count("gradient_accumulation_steps") or 1
    data = keys.text("dataset._component_")
    if data is not None and ".multimodal." not in data:
        given_text_alone(found)
    _read_evaluation(keys, found)
    _read_lengths(keys, found, given)
    found.fields["precision"] = keys.choice("dtype", _PRECISIONS)
    _read_engine(keys, found, given)
    _read_checkpointing(keys, found)
    _read_compilation(keys, found)
    form = "fused" if keys.flag("optimizer.fused") else "foreach"
    add_named_optimizer(keys, "optimizer._component_", found, given, form=form)
    found.fields["optimizer_in_backward"] = keys.flag("optimizer_in_bwd")
    _read_loss(keys, found)


def _read_model(keys: Keys, found: Found, component: str) -> None:
    builder = component.rpartition(".")[2]
    found.model = (
        _sized(keys, builder) if keys.has("model.vocab_size") else torchtune_model(builder)
    )
    if "gemma" in builder:  # ``models/gemma/rms_norm.py``: operation by operation
        found.fields["norm"] = None
    if found.model is None:
        found.notes.append(
            f"model._component_: the model of {builder} is not known here: name a MODEL"
        )
    adapted = builder.startswith(("lora_", "qlora_"))
    if builder.startswith("qlora_") or keys.flag("model.quantize_base"):
        found.fields["quantize"] = "nf4"
        found.quantization |= {"double_quant": True, "device_map": False}
    frozen = _read_adapted_parts(keys, found, builder) if adapted else ""
    if not adapted:
        _read_trained_parts(keys, found, builder)
    names = keys.names("model.lora_attn_modules")
    targets = tuple(_ATTENTION.get(name, name) for name in names)
    in_mlp, in_head = keys.flag("model.apply_lora_to_mlp"), keys.flag("model.apply_lora_to_output")
    if not adapted:
        for key in filter(keys.has, _OF_ADAPTERS):
            keys.take(key)
        return
    rank, alpha = keys.count("model.lora_rank"), keys.number("model.lora_alpha")
    dropout, dora = keys.number("model.lora_dropout"), keys.flag("model.use_dora")
    found.fields["adapter"] = lora(
        rank=rank or 8, alpha=alpha, dropout=dropout, dora=dora,
        targets=(*targets, *(_MLP if in_mlp else ()), *(("lm_head",) if in_head else ())),
        exclude=frozen,
        dtype="bf16" if keys.choice("dtype", _PRECISIONS) == "bf16" else "fp32",
    )  # fmt: skip


_OF_ADAPTERS = ("model.lora_rank", "model.lora_alpha", "model.lora_dropout", "model.use_dora")
_SIZES = (
    "model.vocab_size", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.embed_dim", "model.max_seq_len",
    "model.intermediate_dim", "model.tie_word_embeddings", "model.attn_dropout",
)  # fmt: skip


def _sized(keys: Keys, builder: str) -> dict[str, object]:
    """A model of its own sizes."""
    sizes = {key.removeprefix("model."): keys.take(key) for key in _SIZES if key in keys.values}
    config = torchtune_config(builder, sizes)
    if isinstance(config, str):
        keys.refuse(
            "model._component_",
            f"{config} is missing"
            if config
            else f"{builder} by its sizes is not read: name a MODEL, and a builder of one here",
        )
    return config


def _read_trained_parts(keys: Keys, found: Found, builder: str) -> None:
    """What is trained whole of a model that sees."""
    trained = {key: keys.take(key) for key in _PARTS}
    if _VISION not in builder:
        return
    flags = {key: _PARTS[key][0] if each is None else each for key, each in trained.items()}
    named = [_PARTS[key][1] for key, each in flags.items() if each]
    if len(named) < len(_PARTS):
        found.fields["freeze"] = ALL_BUT + " ".join(named)


def _read_adapted_parts(keys: Keys, found: Found, builder: str) -> str:
    """Modules of a model that sees that no adapter stands on: those of its frozen parts."""
    words = {}
    for key, (by_default, _) in _PARTS.items():
        usual = "lora" if by_default or _VISION not in builder else "frozen"
        words[key] = str(keys.take(key) or usual).lower()
    for key, word in words.items():
        if word == "full":
            found.left_out.append(f"{key} {word} (weights that are trained whole)")
    frozen = [_PARTS[key][1] for key, word in words.items() if word in ("frozen", "false")]
    return f"({'|'.join(' '.join(frozen).split())}).*" if frozen else ""


def _read_lengths(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    length = keys.count("tokenizer.max_seq_len")
    if keys.flag("dataset.packed"):
        found.fields["packing"] = "documents"
    found.fields["seq_len"] = length
    if "seq_len" in given:
        return
    if length is None:
        found.notes.append("tokenizer.max_seq_len is not set: sequences are not cut; give a length")
    else:
        found.notes.append(
            f"tokenizer.max_seq_len {length} is taken for the length of every sequence"
        )


def _why_distributed(keys: Keys, found: Found) -> str:
    """What says that a recipe for several GPUs runs the file (``torchtune/_recipe_registry.py``); empty: nothing does."""
    if any(_is_on(keys.values.get(key)) for key in _DISTRIBUTED):
        return "as its keys are of a distributed recipe"
    if any(word in keys.source for word in _ALONE):
        return ""
    if _OWN_FILES in keys.source.replace("\\", "/"):
        return "as torchtune's registry has this file for a distributed recipe"
    has_adapter = "adapter" in found.fields
    loss = str(keys.values.get("loss._component_"))
    if loss.endswith("DPOLoss") and not has_adapter:
        return "as full DPO has a distributed recipe alone"
    if has_adapter and any(each.startswith("quantizer.") for each in keys.values):
        return "as QAT with LoRA has a distributed recipe alone"
    return ""


def _read_engine(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    for key, field in _DEGREES.items():
        degree = keys.count(key)
        if degree not in (None, 1):
            found.fields[field] = degree
    count = given.get("num_gpus")
    why = _why_distributed(keys, found)
    if count is None and why:
        count = found.fields["num_gpus"] = GPUS_PER_NODE
        found.notes.append(f"{GPUS_PER_NODE} GPUs, {why}, unless you say others")
    elif count is None and keys.values and not any(word in keys.source for word in _ALONE):
        found.notes.append(
            "the recipe is not in the file, but on tune's command line: one for a single device is counted; of a "
            "distributed one give `num_gpus`"
        )
    sharded = isinstance(count, int) and count > 1
    engine = of_given(given, "engine") or ("fsdp" if sharded else "ddp")
    found.fields["engine"] = engine
    offload = keys.flag("fsdp_cpu_offload")
    reshard = keys.take("fsdp_reshard_after_forward")
    replicas = keys.count("data_parallel_replicate_dim")
    layers = keys.names("custom_sharded_layers")
    if engine != "fsdp":
        return
    if offload:
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    if reshard is False:
        found.options["reshard_after_forward"] = False
    if replicas not in (None, 1):
        found.options["data_parallel_replicate_degree"] = replicas
    # Its recipes leave FSDP2's own way: each micro-batch's gradients are reduced (no ``set_requires_gradient_sync``).
    found.options |= {"init_device": "meta", "sync_each_batch": True}
    if {*layers} == {"tok_embeddings", "output"}:
        found.options["wrapping"] = "torchtitan"
    elif layers:
        found.notes.append(
            f"custom_sharded_layers {', '.join(layers)}: counted as in the root's unit, which both tok_embeddings and "
            "output leave or neither does"
        )


def _is_on(value: object) -> bool:
    """Whether a switch is on, or a degree above one."""
    return value not in OFF and (isinstance(value, bool) or not isinstance(value, int) or value > 1)


def _read_evaluation(keys: Keys, found: Found) -> None:
    """Of a batch the loss alone is kept (``full_finetune_single_device.py``, ``validate``)."""
    every, size = keys.count("run_val_every_n_steps"), keys.count("batch_size_val")
    if every is not None and keys.has("dataset_val"):
        found.fields["evaluation"] = size or found.fields["micro_batch_size"]


def _read_checkpointing(keys: Keys, found: Found) -> None:
    if keys.flag("enable_activation_offloading"):
        found.fields["offload_activations"] = "torchtune"
    full = keys.flag("enable_activation_checkpointing")
    mode = keys.text("ac_mode")
    option = keys.take("ac_option")
    if not full and mode is not None:
        full = mode == "full"
        if mode == "selective":
            # Every n-th layer, or by operators (``apply_selective_activation_checkpointing``).
            every = option if isinstance(option, int) and not isinstance(option, bool) else 0
            found.fields["checkpointing"] = 1 / every if every > 0 else "selective"
            return
    found.fields["checkpointing"] = "full" if full else "none"


def _read_compilation(keys: Keys, found: Found) -> None:
    section = keys.section("compile")
    asked = bool(section.get("model", True)) if section is not None else keys.flag("compile")
    found.fields["compile"] = "layer" if asked else "none"


def _read_loss(keys: Keys, found: Found) -> None:
    name = (keys.text("loss._component_") or "").rpartition(".")[2]
    if name in _JOBS:
        job: dict[str, object] = {"kind": _JOBS[name], "log_probabilities": "whole"}
        if keys.has("ref_checkpointer"):
            job["frozen_units"] = "layers"  # full_dpo_distributed.py, ``_setup_reference_model``
        found.fields["job"] = job
        if _JOBS[name] == "grpo":
            _read_groups(keys, found)
    elif name in _CHUNKED:
        found.fields["loss"] = "torchtune"
    teacher = keys.text("teacher_model._component_")
    if teacher is not None:
        own = (keys.text("kd_loss._component_") or "").rpartition(".")[2]
        found.notes.append(
            f"kd_loss {own or 'of torchtune'} is counted as TRL's divergence, which keeps more of both models' logits: the figures "
            "are upper bounds"
        )
        found.fields["job"] = {
            "kind": "distillation", "teacher": _teacher(keys, teacher), "frozen_units": "layers",
        }  # fmt: skip


def _read_groups(keys: Keys, found: Found) -> None:
    """GRPO: a step takes every answer of a batch at once, and a reference model lies beside the trained one.

    ``recipes/dev/grpo_full_finetune_distributed.py``, ``grpo_step``, ``generate_trajectory``; prompts are cut to
    the tokenizer's length, and answers come on top.
    """
    answers, new = keys.count("grpo_samples") or 1, keys.count("max_generated_tokens")
    prompts, length = found.fields["micro_batch_size"], found.fields.get("seq_len")
    at_once = keys.count("forward_batch_size")
    assert isinstance(prompts, int)
    job: dict[str, object] = {
        "kind": "grpo", "frozen_units": "layers", "log_probabilities": "whole",
    }  # fmt: skip
    if keys.has("ref_checkpointer"):
        job["reference"] = "same"
    if new is not None:
        job["completion_length"] = new
    if at_once is not None and at_once != prompts:
        job["scoring_batch_size"] = job["rollout_batch_size"] = at_once * answers
    if isinstance(length, int) and new is not None:
        found.fields["seq_len"] = length + new
        found.notes.append(f"sequences are {length} tokens of a prompt and {new} of its answer")
    found.fields |= {"micro_batch_size": prompts * answers, "job": job}
    if found.fields["engine"] == "fsdp":
        found.options["reshard_after_forward"] = False


def _teacher(keys: Keys, component: str) -> object:
    """The model that a builder makes."""
    key = "teacher_model._component_"
    named = torchtune_model(component.rpartition(".")[2])
    if named is None:
        keys.refuse(key, f"{component!r:.60} is not known: name a job beside the file")
    if isinstance(named, str):
        return named
    from memplan.sources.models import load_model

    return load_model(named)
