"""FSDP as verl runs it (verl 0.9.1, ``workers/engine/fsdp/transformer_impl.py``)."""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.of_verl.places import ACTOR, DTYPES, FSDP, number

_ENGINES = {"fsdp": "fsdp1", "fsdp2": "fsdp"}
_PRECISIONS = {
    ("fp32", "bf16"): "bf16-mixed", ("bf16", "bf16"): "bf16", ("fp32", "fp32"): "fp32",
    ("fp32", "fp16"): "fp16-mixed",
}  # fmt: skip


def read_engine(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """The engine, how it shards, and in which formats."""
    strategy = keys.text(f"{ACTOR}.strategy") or "fsdp"
    if strategy not in _ENGINES:
        keys.refuse(f"{ACTOR}.strategy", f"{strategy!r:.30} is not modelled; fsdp and fsdp2 are")
    engine = of_given(given, "engine") or _ENGINES[strategy]
    found.fields["engine"] = engine
    _read_formats(keys, found, engine)
    keeps = keys.take(f"{FSDP}.reshard_after_forward") is False
    if engine == "fsdp" and keeps:
        found.options["reshard_after_forward"] = False
    elif engine == "fsdp1":
        found.fields["fsdp_strategy"] = "shard_grad_op" if keeps else "full_shard"
        found.options["use_orig_params"] = keys.flag(f"{FSDP}.use_orig_params")
        found.options["forward_prefetch"] = keys.flag(f"{FSDP}.forward_prefetch")
    found.options["sync_each_batch"] = not keys.flag(
        f"{FSDP}.use_no_sync_for_gradient_accumulation"
    )
    if keys.flag(f"{FSDP}.offload_policy") and engine == "fsdp":
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    group, gpus = keys.take(f"{FSDP}.fsdp_size"), number(found, "num_gpus")
    if isinstance(group, int) and 0 < group < gpus:
        found.options["data_parallel_replicate_degree"] = gpus // group
        if engine == "fsdp1":
            found.fields["fsdp_strategy"] = "hybrid"


def _read_formats(keys: Keys, found: Found, engine: str) -> None:
    """Weights, what they are computed in, and autocast over all (``forward_step``)."""
    weights = keys.choice(f"{FSDP}.model_dtype", DTYPES) or "fp32"
    compute = keys.choice(f"{FSDP}.dtype", DTYPES)
    compute = keys.choice(f"{FSDP}.mixed_precision.param_dtype", DTYPES) or compute or "bf16"
    reduced = keys.choice(f"{FSDP}.mixed_precision.reduce_dtype", DTYPES) or "fp32"
    pair = (str(weights), str(compute))
    if pair not in _PRECISIONS:
        keys.refuse(f"{FSDP}.model_dtype", f"{pair[0]} with {pair[1]} compute is not modelled")
    found.fields["precision"] = _PRECISIONS[pair]
    if engine in ("fsdp", "fsdp1"):
        found.options["reduce_dtype"] = reduced
        if compute != "fp32":
            found.options["autocast"] = True
