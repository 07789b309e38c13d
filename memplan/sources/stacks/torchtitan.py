"""torchtitan's TOML files, which it read until February 2026, and the Python configurations that it has since.

Defaults are its ``JobConfig``'s: fp32 shards with bf16 compute and fp32 reduction under FSDP2, and
selective checkpointing. Embedding and head are units of their own (``models/llama3/infra/parallelize.py``).
"""

from collections.abc import Mapping
from math import lcm, prod

from memplan.sources.python_files.values import CLASS
from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import num_layers, torchtitan_model
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.stages import dealt_layers
from memplan.sources.stacks.torchtitan_python import as_toml, is_python
from memplan.training.setup_derived import GPUS_PER_NODE
from memplan.units import ceil_div

NAME = "torchtitan"

_DEGREES = {
    "parallelism.tensor_parallel_degree": "tensor_parallel",
    "parallelism.context_parallel_degree": "context_parallel",
    "parallelism.expert_parallel_degree": "expert_parallel",
}  # fmt: skip
_STAGES = "pipeline_parallel"
_SCHEDULES = {
    "gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "looped-bfs", "interleavedzerobubble": "interleaved-zero-bubble",
    "zbvzerobubble": "zbv", "dualpipev": "dualpipev",
}  # fmt: skip
_LESS_LAYERS = (
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
)
_PRECISIONS = {
    ("float32", "bfloat16"): "bf16-mixed", ("float32", "float32"): "fp32",
    ("bfloat16", "bfloat16"): "bf16",
}  # fmt: skip
_RESHARDING = {"default": True, "always": True, "never": False}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_RECIPES = {
    "tensorwise": "torchao-tensorwise", "rowwise": "torchao-rowwise",
    "rowwise_with_gw_hp": "torchao-rowwise-with-gw-hp",
}  # fmt: skip
_NARROW = "fused_opt_states_bf16"
_FORMS = {"fused": "fused", "foreach": "foreach", "for-loop": "loop", _NARROW: _NARROW}
_MODES = ("none", "selective", "full", "memory_budget")


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether it names a model by its flavor, or has torchtitan's sections."""
    model = values.get("model")
    has_flavor = (isinstance(model, Mapping) and "flavor" in model) or is_python(values)
    beside = {"job", "parallelism", "activation_checkpoint"}
    return has_flavor or ("training" in values and not beside.isdisjoint(values))


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "torchtitan"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    if CLASS in keys.values:
        as_toml(keys, found)
    name, flavor = keys.text("model.name"), keys.text("model.flavor")
    if name is not None and flavor is not None:
        found.model = torchtitan_model(name, flavor)
    named = keys.text("hf_transformers.model")
    if named is not None and not str(flavor).startswith("debugmodel"):
        found.model = named  # that flavor makes a few narrow layers of it (``transformers_modeling_backend/__init__.py``)
    _read_parallelism(keys, found)
    if keys.values and given.get("num_gpus") is None:
        _count_gpus(keys, found)
    _read_sizes(keys, found, given)
    _read_precision(keys, found)
    _read_checkpointing(keys, found)
    form = keys.choice("optimizer.implementation", _FORMS) or "fused"
    if form == _NARROW:
        found.notes.append(
            f"optimizer.implementation {form}: its states are counted in fp32, an upper bound"
        )
    add_named_optimizer(
        keys, "optimizer.name", found, given, form="fused" if form == _NARROW else str(form)
    )
    found.fields["optimizer_in_backward"] = keys.flag("optimizer.early_step_in_backward")
    if keys.has("training.disable_cuda_graphs") and not keys.flag("training.disable_cuda_graphs"):
        found.left_out.append(
            "training.disable_cuda_graphs false (the graphs' own pool, and gradients that stay)"
        )
    if keys.flag("training.enable_cpu_offload"):
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    _read_compilation(keys, found)
    _read_fp8(keys, found)
    _read_replicas(keys, found, given)
    _read_validation(keys, found)


def _count_gpus(keys: Keys, found: Found) -> None:
    """As a script's torchrun says, or as many as the degrees make (``ParallelDims``), or a node's, as ``run_train.sh`` has
    it (``NGPU``)."""
    nodes, on_each = keys.count("nnodes"), keys.count("nproc_per_node")
    if nodes is not None or on_each is not None:
        found.fields["num_gpus"] = (nodes or 1) * (on_each or GPUS_PER_NODE)
        return
    degree: dict[str, int] = {
        field: int(str(found.fields.get(field, 1))) for field in (*_DEGREES.values(), _STAGES)
    }
    replicas = keys.count("parallelism.data_parallel_replicate_degree") or 1
    shards = keys.take("parallelism.data_parallel_shard_degree")
    is_said = isinstance(shards, int) and shards > 0
    split = prod(size for field, size in degree.items() if field != "expert_parallel")
    fewest = lcm(
        split * replicas * (shards if isinstance(shards, int) and is_said else 1),
        degree["expert_parallel"] * degree[_STAGES],
    )
    count = fewest if is_said else ceil_div(GPUS_PER_NODE, fewest) * fewest
    found.fields["num_gpus"] = count
    found.notes.append(
        f"{count} GPUs, as its degrees and run_train.sh (NGPU) make them, unless you say others"
        if count > 1
        else "1 GPU, as its degrees make it, unless you say others"
    )


def _read_validation(keys: Keys, found: Found) -> None:
    """Of a batch the loss alone stays (``components/validate.py``); sizes of its own (``config/job_config.py``)."""
    size = keys.count("validation.local_batch_size") or VALIDATION_BATCH
    length = keys.count("validation.seq_len") or VALIDATION_LENGTH
    if keys.flag("validation.enable"):
        found.fields["evaluation"] = {"batch_size": size, "seq_len": length}


VALIDATION_BATCH, VALIDATION_LENGTH = 8, 2048
"""``Validation`` where a file does not say them."""


def _read_parallelism(keys: Keys, found: Found) -> None:
    for key, field in _DEGREES.items():
        degree = keys.count(key)
        if degree not in (None, 1):
            found.fields[field] = degree
    _read_split_experts(keys, found)
    _read_stages(keys, found)
    method = keys.text("parallelism.context_parallel_rotate_method")
    if method not in (None, "allgather") and "context_parallel" in found.fields:
        found.options["context_parallel_rotate_method"] = method
    if found.fields.get("tensor_parallel"):
        found.fields["sequence_parallel"] = (
            keys.take("parallelism.enable_sequence_parallel") is not False
        )
        found.fields["loss_parallel"] = not keys.flag("parallelism.disable_loss_parallel")
    reshards = keys.choice("parallelism.fsdp_reshard_after_forward", _RESHARDING)
    if reshards is False:
        found.options["reshard_after_forward"] = False


def _read_split_experts(keys: Keys, found: Found) -> None:
    """Experts that are not spread are split as the layers are, whatever is said of them (``apply_moe_ep_tp``)."""
    key = "parallelism.expert_tensor_parallel_degree"
    if (keys.count(key) or 1) > 1 and "expert_parallel" in found.fields:
        keys.refuse(key, "experts that are spread and split too are not modelled; 1 is")


def _read_stages(keys: Keys, found: Found) -> None:
    """The schedule, and how many layers each stage has."""
    stages = keys.count("parallelism.pipeline_parallel_degree") or 1
    schedule = keys.text("parallelism.pipeline_parallel_schedule")
    if stages == 1:
        return
    found.fields[_STAGES] = stages
    word = (schedule or "1f1b").lower()
    if word not in _SCHEDULES:
        keys.refuse("parallelism.pipeline_parallel_schedule", f"{schedule!r:.40} is not modelled")
    found.fields["pipeline_schedule"] = _SCHEDULES[word]
    chunks = 1
    less = [keys.take(key) for key in _LESS_LAYERS]
    if word not in ("gpipe", "1f1b"):
        found.fields["virtual_stages"] = chunks = _virtual_stages(keys, found, stages)
    layers = None if found.model is None else num_layers(found.model)
    if layers is None:
        return
    first, last = (each if isinstance(each, int) else 1 for each in less)
    if max(first, last) > (layers + first + last) // (chunks * stages):
        keys.refuse(
            _LESS_LAYERS[first < last], "is more than a stage has layers: torchtitan stops at it"
        )
    dealt = dealt_layers(layers, chunks * stages, first=first, last=last)
    found.fields["layers_per_stage"] = dealt


def _read_replicas(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """FSDP2, or DDP under autocast where nothing is sharded (``apply_replicate``)."""
    replicas = keys.count("parallelism.data_parallel_replicate_degree")
    shards = keys.take("parallelism.data_parallel_shard_degree")
    if replicas not in (None, 1) and shards == 1:
        found.fields["engine"] = "ddp"
        if found.fields["precision"] == "bf16-mixed":
            found.fields["precision"] = "bf16-amp"
        found.options.clear()
        return
    if of_given(given, "engine") not in (None, "fsdp"):
        found.options.clear()
    else:
        found.options |= {"init_device": "to_empty", "wrapping": "torchtitan"}
    found.fields["engine"] = "fsdp"
    if replicas not in (None, 1):
        found.options["data_parallel_replicate_degree"] = replicas


def _virtual_stages(keys: Keys, found: Found, ranks: int) -> int:
    """Stages of a rank: embedding and head count as layers (``pipeline_llm``)."""
    each = keys.count("parallelism.pipeline_parallel_layers_per_stage")
    less = 0
    for key in _LESS_LAYERS:
        value = keys.take(key)
        less += value if isinstance(value, int) else 1
    layers = None if each is None or found.model is None else num_layers(found.model)
    if each is None or layers is None:
        return 2
    stages, rest = divmod(-(-(layers + less) // each), ranks)
    if rest:
        keys.refuse(
            "parallelism.pipeline_parallel_layers_per_stage",
            f"{layers} layers and {less} for embedding and head are no multiple of {ranks} stages of {each}",
        )
    return max(2, stages)


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    micro = keys.count("training.local_batch_size") or 8
    in_batch = 1
    if "pipeline_parallel" in found.fields:
        # A pipeline cuts its micro-batches out of one local batch.
        local, key = micro, "parallelism.pipeline_parallel_microbatch_size"
        micro = keys.count(key) or 1
        in_batch, rest = divmod(local, micro)
        if rest:
            keys.refuse(key, f"{local} sequences are no whole number of micro-batches of {micro}")
        found.fields["gradient_accumulation_steps"] = in_batch
    found.fields["micro_batch_size"] = micro
    found.fields["seq_len"] = keys.count("training.seq_len")
    size, words = keys.count("training.img_size"), keys.count("encoder.max_t5_encoding_len")
    if size is not None:
        found.fields |= {"image_size": size, "seq_len": words, "kernels": "hf"}
    whole = keys.take("training.global_batch_size")
    gpus = given.get("num_gpus") or found.fields.get("num_gpus", 1)
    if isinstance(whole, int) and whole > 0 and isinstance(gpus, int):
        degrees = [
            found.fields.get(field, 1) for field in _DEGREES.values() if "expert" not in field
        ]
        ranks = gpus
        for degree in (*degrees, found.fields.get("pipeline_parallel", 1)):
            assert isinstance(degree, int)
            ranks = max(1, ranks // degree)
        if whole % (micro * in_batch * ranks):
            keys.refuse(
                "training.global_batch_size",
                f"{whole} sequences are no whole number of {micro * in_batch} x {ranks} ranks; give "
                "`num_gpus`",
            )
        runs = whole // (micro * ranks * in_batch)
        found.fields["gradient_accumulation_steps"] = in_batch if in_batch > 1 else runs
        if in_batch > 1 and runs > 1:
            found.notes.append(
                f"a step is {runs} runs of the pipeline over {in_batch} micro-batches each, of which one is "
                "counted"
            )


def _read_precision(keys: Keys, found: Found) -> None:
    dtype = keys.text("training.dtype") or "float32"
    compute = keys.text("training.mixed_precision_param") or "bfloat16"
    if (dtype, compute) not in _PRECISIONS:
        keys.refuse("training.dtype", f"{dtype!r:.20} with {compute!r:.20} compute is not modelled")
    found.fields["precision"] = _PRECISIONS[(dtype, compute)]
    found.options["reduce_dtype"] = keys.choice("training.mixed_precision_reduce", _DTYPES)


def _read_checkpointing(keys: Keys, found: Found) -> None:
    mode = keys.text("activation_checkpoint.mode") or "selective"
    option = keys.text("activation_checkpoint.selective_ac_option") or "op"
    if mode not in _MODES:
        keys.refuse("activation_checkpoint.mode", f"{mode!r:.30} is none of {', '.join(_MODES)}")
    if mode == "selective" and option.isdecimal():
        found.fields["checkpointing"] = 1 / int(option)
        found.notes.append(f"selective_ac_option {option}: every {option}th layer is checkpointed")
        return
    if mode == "memory_budget":
        found.notes.append(
            "activation_checkpoint.mode memory_budget is counted as none, an upper bound"
        )
        mode = "none"
    found.fields["checkpointing"] = mode


def _read_compilation(keys: Keys, found: Found) -> None:
    parts = keys.names("compile.components")
    asked = keys.flag("compile.enable") and (not parts or "model" in parts)
    found.fields["compile"] = "layer" if asked else "none"
    if keys.flag("compile.enable") and parts == ("loss",):
        found.notes.append(
            "compile.components loss compiles the loss alone, which is not modelled: the figures are upper bounds"
        )


def _read_fp8(keys: Keys, found: Found) -> None:
    named = keys.names("model.converters")
    converters = [each for each in named if "grouped_mm" not in each]
    if len(converters) < len(named):
        found.left_out.append("quantize.grouped_mm (experts in 8 bits)")
    recipe = keys.text("quantize.linear.float8.recipe_name") or "tensorwise"
    gathers = keys.flag("quantize.linear.float8.enable_fsdp_float8_all_gather")
    if any("mx" in each for each in converters):
        found.notes.append("model.converters mx: MXFP8 is counted as torchao's fp8 by rows")
        found.fields["fp8"] = "torchao-rowwise"
    elif any("float8" in each for each in converters):
        if recipe not in _RECIPES:
            keys.refuse("quantize.linear.float8.recipe_name", f"{recipe!r:.30} is not modelled")
        found.fields["fp8"] = _RECIPES[recipe]
        if gathers:
            found.options["enable_fsdp_float8_all_gather"] = True
