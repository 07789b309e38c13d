"""nanotron's YAML (``src/nanotron/config``): sizes of a model, tokens and three-dimensional parallelism.

Weights in bf16 with fp32 gradients and an fp32 copy, all flat, which ZeRO-1 shards over the data-parallel ranks, are what
Megatron's optimizer holds too (``optim/gradient_accumulator.py``, ``optim/zero.py``); torch's DDP keeps buckets of its own beside them.
"""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import nanotron_config

NAME = "nanotron"

_SIZES = "model.model_config"
_SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}
_PRECISIONS = {
    ("bfloat16", True): "bf16-master", ("float16", True): "fp16-master", ("bfloat16", False): "bf16",
    ("float32", False): "fp32", ("float32", True): "fp32",
}  # fmt: skip
"""By ``model.dtype`` and ``accumulate_grad_in_fp32``."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether tokens stand beside parallelism or an optimizer of its own."""
    return "tokens" in values and bool(values.keys() & {"parallelism", "optimizer", "data_stages"})


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "nanotron"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    _read_model(keys, found)
    _read_parallelism(keys, found)
    found.fields["micro_batch_size"] = keys.count("tokens.micro_batch_size") or 1
    steps = keys.count("tokens.batch_accumulation_per_replica")
    found.fields["gradient_accumulation_steps"] = steps or 1
    found.fields["seq_len"] = keys.count("tokens.sequence_length")
    _read_states(keys, found, given)


def _read_model(keys: Keys, found: Found) -> None:
    multiple = keys.count("model.make_vocab_size_divisible_by") or 1
    sizes = keys.section(_SIZES)
    if not sizes:
        return
    degree = keys.count("parallelism.tp") or 1
    config, problem = nanotron_config(sizes, padded_to=multiple * degree)
    if config is None:
        keys.refuse(_SIZES, problem)
    found.model = config


def _read_parallelism(keys: Keys, found: Found) -> None:
    degrees = [keys.count(f"parallelism.{name}") or 1 for name in ("dp", "tp", "pp")]
    contexts = keys.count("parallelism.context_parallel_size") or 1
    replicas, tensors, stages = degrees
    found.fields["num_gpus"] = replicas * tensors * stages * contexts
    for field, degree in (
        ("tensor_parallel", tensors), ("pipeline_parallel", stages), ("context_parallel", contexts),
    ):  # fmt: skip
        if degree > 1:
            found.fields[field] = degree
    mode = (keys.text("parallelism.tp_mode") or "ALL_REDUCE").upper()
    again = keys.take("parallelism.tp_recompute_allgather")
    if tensors > 1 and mode == "REDUCE_SCATTER":
        found.fields["sequence_parallel"] = True
        if again is False:
            found.left_out.append("tp_recompute_allgather (gathered inputs that backward keeps)")
    schedule = keys.choice("parallelism.pp_engine", _SCHEDULES)
    if stages > 1:
        found.fields["pipeline_schedule"] = schedule or "gpipe"
    whole = keys.flag("parallelism.recompute_layer")
    found.fields["checkpointing"] = "full" if whole else "none"


def _read_states(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """bf16 weights alone, or fp32 ones and gradients beside them."""
    dtype = keys.text("model.dtype") or "bfloat16"
    wide = keys.flag("optimizer.accumulate_grad_in_fp32")
    precision = _PRECISIONS.get((dtype, wide))
    if precision is None:
        keys.refuse("model.dtype", f"{dtype!r:.40} is not modelled; bfloat16 and float32 are")
    engine = of_given(given, "engine") or ("megatron" if wide else "ddp")
    found.fields |= {"engine": engine, "precision": precision}
    stage = keys.take("optimizer.zero_stage")
    if stage not in (None, 0):
        if engine != "megatron":
            keys.refuse("optimizer.zero_stage", "without fp32 gradients is not modelled: write 0")
        found.options["use_distributed_optimizer"] = True
    if engine == "megatron" and (keys.count("parallelism.dp") or 1) > 1 and "float16" in dtype:
        found.left_out.append("DDP's buckets (2 bytes of each parameter, beside fp32 gradients)")
    name = (keys.text("optimizer.optimizer_factory.name") or "adamW").lower()
    fused = keys.flag("optimizer.optimizer_factory.torch_adam_is_fused")
    if name == "sgd":
        found.fields["optimizer"] = "sgd"
    else:
        found.fields["optimizer"] = "adamw-fused" if fused else "adamw-foreach"
    if found.fields["engine"] == "megatron":
        # The model has as many rows already as nanotron pads its vocabulary to.
        found.options["make_vocab_size_divisible_by"] = 1
        found.fields["optimizer"] = "sgd" if name == "sgd" else "adamw-fused"
