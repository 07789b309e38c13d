"""Arguments of Megatron-LM's programs: a launcher's flags, or what ``--emit megatron`` writes.

Names are written with underscores, as ``megatron/training/arguments.py`` has them after parsing (main d98e8a64). The model is made of its
sizes where a class of transformers' has the same layers; else it has to be named beside the file. Which model they are sizes of,
the program says: ``pretrain_gpt.py`` where the script names none.
"""

from collections.abc import Mapping
from math import lcm

from memplan.sources.stacks.common.found import Found, micro_batches
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.megatron_model import model_config
from memplan.training.layer_choice import CheckpointedLayers

NAME = "Megatron-LM"

_MARKS = frozenset({"num_layers", "hidden_size"})
_SPLITS = frozenset(
    {"tensor_model_parallel_size", "micro_batch_size", "pipeline_model_parallel_size"}
)
_DEGREES = {
    "tensor_model_parallel_size": "tensor_parallel", "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel", "expert_model_parallel_size": "expert_parallel",
}  # fmt: skip
_FLAGS = (
    "use_distributed_optimizer", "use_precision_aware_optimizer", "grad_reduce_in_bf16",
    "overlap_grad_reduce", "overlap_param_gather", "distribute_saved_activations",
    "ddp_pad_buckets_for_high_nccl_busbw", "attention_softmax_in_fp32", "cross_entropy_loss_fusion",
)  # fmt: skip
"""Options of the engine that are flags without a value."""
_SWITCHES = (
    "no_gradient_accumulation_fusion", "no_masked_softmax_fusion", "no_bias_gelu_fusion",
    "no_bias_swiglu_fusion", "no_bias_dropout_fusion", "no_rope_fusion",
)  # fmt: skip
"""What each switches off is on otherwise."""
_VALUES = (
    "ddp_bucket_size", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "transformer_impl", "make_vocab_size_divisible_by", "cross_entropy_fusion_impl",
)  # fmt: skip
"""Options of the engine of the same name."""
_USUAL = {"make_vocab_size_divisible_by": 128, "transformer_impl": "transformer_engine"}


_RECIPES = {
    "delayed": "te-delayed", "tensorwise": "te-current", "blockwise": "te-blockwise", "mxfp8": "te-mxfp8",
}  # fmt: skip
"""``--fp8-recipe`` (core/fp8_utils.py, ``get_fp8_recipe``)."""
_DECODERS = "pretrain_gpt"
_OTHER_PROGRAMS = {
    "pretrain_bert": "Megatron's BERT is not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_t5": "Megatron's T5 is not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_vlm": "Megatron's multimodal models are not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_ict": "Megatron's retrievers are not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_retro": "Megatron's RETRO is not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_vision_classify": "Megatron's ViT is not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_vision_dino": "Megatron's ViT is not modelled; its decoders (pretrain_gpt.py) are",
    "pretrain_vision_inpaint": "Megatron's ViT is not modelled; its decoders (pretrain_gpt.py) are",
    **dict.fromkeys(
        (
            "run_text_generation_server", "run_text_generation", "run_hybrid_text_generation_server",
            "run_hybrid_text_generation_server_completions", "run_dynamic_text_generation_server",
            "run_vlm_text_generation", "run_inference_performance_test", "launch_inference_server",
            "gpt_static_inference", "gpt_dynamic_inference", "gpt_dynamic_inference_with_coordinator",
            "offline_inference", "simple_t5_batch_inference", "text_generation_cli", "generate", "mmlu",
            "quantize", "prune", "export", "validate", "offline_feature_extract", "benchmark_refit",
            "convert", "convert_model", "01_convert_from_hf", "03_convert_to_hf", "preprocess_data",
        ),
        "it trains nothing: pretrain_gpt.py does",
    ),
}  # fmt: skip
"""Programs that make another model of the same sizes, and those of ``tools`` and ``examples`` that train none."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether a model's sizes stand beside how it is split."""
    has_sizes = values.keys() >= _MARKS and bool(values.keys() & _SPLITS)
    if values.get("program") in _OTHER_PROGRAMS:
        return True
    return has_sizes or "tensor_model_parallel_size" in values


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "megatron-lm"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the arguments say into ``found``."""
    found.fields["engine"] = "megatron"
    found.model = _model(keys)
    _read_degrees(keys, found, given)
    _read_sizes(keys, found, given)
    _read_states(keys, found)
    _read_options(keys, found)
    _read_recomputation(keys, found)
    _read_dropout(keys, found)
    backend = keys.text("attention_backend")
    if backend in ("unfused", "local"):
        found.left_out.append(f"attention_backend {backend} (scores that it keeps)")


def _model(keys: Keys) -> dict[str, object] | None:
    """By its sizes, of the decoders that ``pretrain_gpt.py`` trains; hybrids have to be named."""
    program = keys.text("program") or _DECODERS
    if program in _OTHER_PROGRAMS:
        keys.refuse("program", f"{program}.py: {_OTHER_PROGRAMS[program]}")
    made = model_config(keys)
    return made if program == _DECODERS else None


def _read_degrees(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    shared = 1
    for key, field in _DEGREES.items():
        degree = keys.count(key) or 1
        if degree > 1:
            found.fields[field] = degree
        shared *= 1 if field == "expert_parallel" else degree
    degrees = {
        name: keys.count(f"{name}_model_parallel_size") or 1
        for name in ("tensor", "pipeline", "expert")
    }
    split = keys.count("expert_tensor_parallel_size")
    if degrees["expert"] > 1 and split is not None:
        found.options["expert_tensor_parallel_size"] = split
    experts = degrees["expert"] * (split or degrees["tensor"]) if degrees["expert"] > 1 else 1
    fewest = degrees["pipeline"] * lcm(shared // degrees["pipeline"], experts)
    if keys.flag("sequence_parallel") and "tensor_parallel" in found.fields:
        found.fields["sequence_parallel"] = True
    _read_stages(keys, found)
    nodes, on_each = keys.count("nnodes") or 1, keys.count("nproc_per_node")
    if given.get("num_gpus") is not None:
        return
    if on_each is not None and not nodes * on_each % fewest:
        found.fields |= {"num_gpus": nodes * on_each, "num_nodes": nodes}
    else:
        found.fields["num_gpus"] = fewest
        found.notes.append(
            f"{fewest} GPUs, the fewest that its degrees need, unless you say others"
        )


def _read_stages(keys: Keys, found: Found) -> None:
    """Chunks of a rank by how many layers each has, or a layout: ``Et*7|t*8|t*8|t*7L``."""
    stages, layers = keys.count("pipeline_model_parallel_size") or 1, keys.count("num_layers")
    each, layout = (
        keys.count("num_layers_per_virtual_pipeline_stage"),
        keys.text("pipeline_model_parallel_layout"),
    )
    chunks = keys.count("num_virtual_stages_per_pipeline_rank")
    if stages == 1:
        return
    if layout is not None:
        counts = layer_counts(layout.strip("\"'"))
        if not counts or len(counts) % stages:
            keys.refuse(
                "pipeline_model_parallel_layout", "write stages of layers, as 'Et*7|t*8|t*8|t*7L'"
            )
        chunks = len(counts) // stages
        found.fields["layers_per_stage"] = counts
    elif each is not None and layers is not None:
        chunks = max(1, layers // (each * stages))
    if chunks is not None and chunks > 1:
        found.fields |= {"virtual_stages": chunks, "pipeline_schedule": "interleaved-1f1b"}


def stage_layers(
    layers: int, stages: int, *, ends: tuple[int | None, int | None], counted: tuple[bool, bool]
) -> tuple[int, ...]:  # fmt: skip
    """Layers of each stage, in order (``get_num_layers_to_build``): those of the ends as said, or one less where the
    embedding or the loss counts as a layer; the others share evenly.

    >>> stage_layers(61, 16, ends=(3, 2), counted=(False, False))
    (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2)
    >>> stage_layers(30, 4, ends=(None, None), counted=(True, True))
    (7, 8, 8, 7)
    """
    given = [each for each in ends if each is not None]
    between = stages - len(given)
    each = (layers + sum(counted) - sum(given)) // max(1, between)
    counts = [each] * stages
    for place, end, less in zip((0, -1), ends, counted, strict=True):
        counts[place] = end if end is not None else each - less
    return tuple(counts)


def layer_counts(layout: str) -> tuple[int, ...]:
    """Layers of each stage of a layout; empty where it says anything but embedding, layers and loss.

    >>> layer_counts("Ett|t*3|tL")
    (2, 3, 1)
    """
    counts = []
    for stage in layout.split("|"):
        plain = stage.removeprefix("E").removesuffix("L").replace(",", "")
        head, star, number = plain.partition("*")
        if set(head) - {"t"} or (star and not number.isdecimal()):
            return ()
        counts.append(len(head) - 1 + int(number) if star else len(head))
    return tuple(counts)


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    micro, whole = keys.count("micro_batch_size") or 1, keys.count("global_batch_size")
    gpus = given.get("num_gpus") or found.fields["num_gpus"]
    assert isinstance(gpus, int)
    for field in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        degree = found.fields.get(field, 1)
        assert isinstance(degree, int)
        gpus = max(1, gpus // degree)
    found.fields |= {"micro_batch_size": micro, "seq_len": keys.count("seq_length")}
    if whole is not None:
        found.fields["gradient_accumulation_steps"] = micro_batches(
            found, batch=whole, micro=micro, ranks=gpus, stack=NAME
        )


def _read_states(keys: Keys, found: Found) -> None:
    """The format, and the optimizer: Transformer Engine's or Apex's fused Adam, or SGD."""
    halves = {"bf16": keys.flag("bf16"), "fp16": keys.flag("fp16")}
    half = next((name for name, asked in halves.items() if asked), None)
    found.fields["precision"] = "fp32" if half is None else f"{half}-master"
    recipe = keys.choice("fp8_recipe", _RECIPES) or _RECIPES["delayed"]
    if keys.text("fp8_format") is not None:
        found.fields["fp8"] = recipe
    name, momentum = keys.text("optimizer") or "adam", keys.number("sgd_momentum")
    if name not in ("adam", "sgd"):
        keys.refuse("optimizer", f"{name!r:.40} is not modelled; adam and sgd are")
    found.fields["optimizer"] = (
        "adamw-fused" if name == "adam" else "sgd-momentum" if momentum else "sgd"
    )


def _read_options(keys: Keys, found: Found) -> None:
    for name in _FLAGS:
        if keys.flag(name):
            found.options[name] = True
    for name in _SWITCHES:
        if keys.flag(name):
            own = name.removeprefix("no_")
            found.options["apply_rope_fusion" if own == "rope_fusion" else own] = False
    for name in _VALUES:
        value = keys.take(name)
        if value is not None and value != _USUAL.get(name):
            found.options[name] = value


def _read_recomputation(keys: Keys, found: Found) -> None:
    kind, modules = keys.text("recompute_granularity"), keys.text("recompute_modules")
    if keys.flag("recompute_activations"):
        kind = kind or "selective"
    recomputation(
        found, kind=kind, method=keys.text("recompute_method"), count=keys.count("recompute_num_layers"),
        modules=None if modules is None else tuple(modules.split()),
    )  # fmt: skip


def recomputation(
    found: Found, *, kind: str | None, method: str | None, count: int | None, modules: tuple[str, ...] | None
) -> None:  # fmt: skip
    """What is computed again in backward, by Megatron-core's words for it; ``kind``: full, selective or nothing."""
    stages = found.fields.get("pipeline_parallel", 1)
    if kind == "selective" and modules is None:
        found.fields["checkpointing"] = "selective"
    elif kind == "full" and (method, count or 1) == ("uniform", 1):
        found.fields["checkpointing"] = "full"
    elif kind == "full" and method == "block" and count is not None and stages == 1:
        found.fields["checkpointing"] = CheckpointedLayers.first(count)
    elif kind is not None:
        own = {
            "recompute_granularity": kind, "recompute_method": method, "recompute_num_layers": count,
            "recompute_modules": modules,
        }  # fmt: skip
        found.options |= {name: value for name, value in own.items() if value is not None}


def _read_dropout(keys: Keys, found: Found) -> None:
    """One share of both kinds; where they differ the model's own, said so where it is not made of these arguments."""
    hidden, weights = keys.number("hidden_dropout"), keys.number("attention_dropout")
    if hidden == weights:
        found.fields["dropout"] = hidden
    elif not isinstance(found.model, Mapping) or found.model["model_type"] != "gpt2":
        found.notes.append(
            f"hidden_dropout {hidden:g} and attention_dropout {weights:g}: counted as the model has them"
        )
