"""DeepSpeed's own settings, by its own names, with its defaults (0.19.8, ``runtime/zero/config.py``).

``"auto"`` is what the Hugging Face integration fills in (transformers 5.23,
``integrations/deepspeed.py``, ``trainer_config_finalize``): a bucket of hidden_size squared, a
prefetch bucket of 0.9 times that, a persistence threshold of ten times hidden_size; accelerate adds
that the whole model is not gathered for saving.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass, replace
from memplan.memory.engine_options import says_loading, says_quantization
from memplan.training.choices import Offload, ZeroStage
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.partition import DEFAULT_METHOD, check_method

AUTO = "auto"
"""The value that the integration replaces."""
UNLIMITED = 2**63 - 1
"""``sys.maxsize`` of the engine's machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedOptions:
    """The settings that decide how many bytes a rank holds; sizes are in elements."""

    reduce_bucket_size: int = 500_000_000
    """Gradients reduced at once."""
    overlap_comm: bool = False
    """A second bucket is filled while the first is reduced (stages 1 and 2). The engine's default
    is true for stage 3, where it only moves work to another stream."""
    prefetch_bucket_size: int = 50_000_000
    """Parameters gathered ahead of their use."""
    param_persistence_threshold: int = 100_000
    """Parameters up to this size stay gathered."""
    model_persistence_threshold: int = UNLIMITED
    """All parameters that stay gathered, at most."""
    max_live_parameters: int = 1_000_000_000
    """No prefetch beyond this many gathered parameters."""
    max_reuse_distance: int = 1_000_000_000
    """A parameter used again within this many is not released."""
    sub_group_size: int = 1_000_000_000
    """Elements that the stage 3 optimizer updates at once."""
    hpz_partition_size: int = 1
    """Ranks that have a second set of shards among them, from which the backward pass gathers (ZeRO++)."""
    gather_16bit_weights_on_model_save: bool = False
    """Saving gathers the whole model on rank 0."""
    allgather_sequential: bool = False
    """Parameters are gathered one by one, without a flat buffer."""
    round_robin_gradients: bool = False
    """Parameters are dealt to the ranks in turn (stages 1 and 2)."""
    grad_accum_dtype: DType | None = None
    """Of accumulated gradients; None: the weights'."""
    communication_data_type: DType | None = None
    """In which gradients are summed over the ranks; None: the weights'."""
    sequence_communication_dtype: DType | None = None
    """The same where ranks share sequences; None: fp32 (``SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT``)."""
    reduce_scatter: bool = True
    """Stages 1 and 2 sum a bucket piece by piece, through a flat copy; without it, in place."""
    contiguous_gradients: bool = True
    """Stage 3 has a reduce bucket; without it gradients wait where autograd put them."""
    bf16_masters: bool = False
    """Master weights, their gradients and the states are bf16. On the GPU the engine takes this
    only together with the next one."""
    bf16_states: bool = False
    """The optimizer's states are bf16."""
    torch_adam: bool = False
    """The optimizer is PyTorch's own: so with ``torch_adam`` in the optimizer's section, and where
    there is no such section and the training loop brings one (HF Trainer)."""
    immediate_grad_update: bool = False
    """BF16_Optimizer adds each gradient to the fp32 one as soon as it is there."""
    check_gradient_norm: bool = True
    """The step takes the norm of the gradients (stages 1 and 2)."""
    zero_init: bool = True
    """The model is built inside ``deepspeed.zero.Init``, as transformers and accelerate do."""
    pin_memory: bool = True
    """Offloaded optimizer states are page-locked; so since 0.19.5."""
    param_pin_memory: bool = True
    """The same for offloaded parameters."""
    optimizer_buffer_count: int = 4
    """Buffers of the largest sub-group's size, in swapping to NVMe."""
    param_buffer_count: int = 5
    """Buffers in swapping parameters to NVMe."""
    param_buffer_size: int = 100_000_000
    """Elements of each of them."""
    param_max_in_cpu: int = 1_000_000_000
    """Parameters that stay in CPU memory in spite of NVMe offload."""
    zenflow_interval: int = 1
    """Steps for each one of the CPU's (ZenFlow, ``update_interval``); between them the GPU updates what matters most."""
    zenflow_overlaps: bool = False
    """The CPU's step runs beside the next ones (``overlap_step``)."""
    steps_beside_backward: bool = False
    """The CPU steps a sub-group as soon as its gradients are there (SuperOffload without ``gradient_clipping``, which waits for all)."""
    partition_method: str = DEFAULT_METHOD
    """Of a pipeline, how layers are dealt to stages: uniform, parameters or type: with a pattern."""
    left_out: tuple[str, ...] = ()
    """Settings that cost memory and are not modelled, in words."""
    unsaved: tuple[str, ...] = ()
    """Settings that save memory and are not modelled, in words."""


def _count(name: str, value: object) -> int:
    """A whole number; ``5e8`` counts as one, and YAML reads it as a string."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        msg = f"engine_options: {name} must be a whole number of 0 or more, got {value!r}"
        raise SetupError(msg)
    return number


def _flag(name: str, value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        msg = f"engine_options: {name} must be true or false, got {value!r}"
        raise SetupError(msg)
    return value


_DTYPES = {
    "fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16,
    "float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16,
}  # fmt: skip


def _dtype(name: str, value: object) -> DType | None:
    if value is None or isinstance(value, DType):
        return value
    found = _DTYPES.get(str(value).lower())
    if found is None:
        msg = f"engine_options: {name} must be fp32, bf16 or fp16, got {value!r}"
        raise SetupError(msg)
    return found


def _interval(name: str, value: object) -> int:
    """What ``"auto"`` comes to is measured while it runs: one, which hides least."""
    return 1 if value == AUTO else max(_count(name, value), 1)


def _hpz(name: str, value: object) -> int:
    return max(_count(name, value), 1)


def _method(name: str, value: object) -> str:  # noqa: ARG001
    return check_method(value)


MODELLED: dict[str, tuple[str, Callable[[str, object], object]]] = {
    "reduce_bucket_size": ("reduce_bucket_size", _count),
    "overlap_comm": ("overlap_comm", _flag),
    "stage3_prefetch_bucket_size": ("prefetch_bucket_size", _count),
    "stage3_param_persistence_threshold": ("param_persistence_threshold", _count),
    "stage3_model_persistence_threshold": ("model_persistence_threshold", _count),
    "stage3_max_live_parameters": ("max_live_parameters", _count),
    "stage3_max_reuse_distance": ("max_reuse_distance", _count),
    "sub_group_size": ("sub_group_size", _count),
    "zero_hpz_partition_size": ("hpz_partition_size", _hpz),
    "stage3_gather_16bit_weights_on_model_save": ("gather_16bit_weights_on_model_save", _flag),
    "stage3_allgather_sequential": ("allgather_sequential", _flag),
    "round_robin_gradients": ("round_robin_gradients", _flag),
    "grad_accum_dtype": ("grad_accum_dtype", _dtype),
    "communication_data_type": ("communication_data_type", _dtype),
    "seq_parallel_communication_data_type": ("sequence_communication_dtype", _dtype),
    "reduce_scatter": ("reduce_scatter", _flag),
    "torch_adam": ("torch_adam", _flag),
    "contiguous_gradients": ("contiguous_gradients", _flag),
    "bf16_master_weights_and_grads": ("bf16_masters", _flag),
    "bf16_optimizer_states": ("bf16_states", _flag),
    "immediate_grad_update": ("immediate_grad_update", _flag),
    "compute_grad_norm": ("check_gradient_norm", _flag),
    "zero_init": ("zero_init", _flag),
    "zenflow.update_interval": ("zenflow_interval", _interval),
    "zenflow.overlap_step": ("zenflow_overlaps", _flag),
    "partition_method": ("partition_method", _method),
    "pin_memory": ("pin_memory", _flag),
    "offload_optimizer.pin_memory": ("pin_memory", _flag),
    "offload_optimizer.buffer_count": ("optimizer_buffer_count", _count),
    "offload_param.pin_memory": ("param_pin_memory", _flag),
    "offload_param.buffer_count": ("param_buffer_count", _count),
    "offload_param.buffer_size": ("param_buffer_size", _count),
    "offload_param.max_in_cpu": ("param_max_in_cpu", _count),
}
"""The engine's name of each setting that is modelled: our field, and how its value is read."""

WITHOUT_EFFECT = frozenset({
    "allgather_bucket_size", "allgather_partitions", "parameter_alignment",
    "load_from_fp32_weights", "elastic_checkpoint", "ignore_unused_parameters",
    "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
    "enable_sanity_checks", "offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write",
    "offload_optimizer.fast_init", "gradient_clipping", "use_multi_rank_bucket_allreduce",
})  # fmt: skip
"""Settings that move no bytes worth counting: with torch 1.13 or newer the all-gather of updated
parameters is in place, and the alignment pads fewer than eight elements per parameter."""

UNMODELLED: dict[str, object] = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False, "zero_quantized_gradients": False,
    "stage3_module_granularity_threshold": 0, "stage3_use_all_reduce_for_fetch_params": False,
    "offload_optimizer.ratio": 1.0, "offload_optimizer.super_offload": False,
    "fp16_master_weights_and_grads": False, "zenflow": None, "leaf_module": None,
}  # fmt: skip
"""Settings that do change memory and are not modelled, with the only value that is."""

_SAVING = frozenset({
    "contiguous_gradients", "zero_quantized_nontrainable_weights", "bf16_master_weights_and_grads",
    "bf16_optimizer_states", "fp16_master_weights_and_grads",
})  # fmt: skip
"""Those of them that save memory: gradients that wait where autograd put them instead of in a bucket
kept for them, and weights, masters and states in fewer bits."""

_STAGE_3_ONLY = frozenset({
    "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "offload_optimizer.super_offload", "leaf_module",
})  # fmt: skip
"""Those of them that do nothing below stage 3."""

OPTION_NAMES: tuple[str, ...] = (*MODELLED, *sorted(WITHOUT_EFFECT), *UNMODELLED)
"""Every name that ``engine_options`` takes with DeepSpeed."""


@lru_cache(maxsize=64)
def read_options(setup: TrainingSetup, *, hidden_size: int) -> DeepSpeedOptions:
    """The engine's settings for a resolved setup; remembered, since its ranks and cards share them.

    ``hidden_size`` is what ``"auto"`` is filled in from. Raises ``SetupError`` for names that the
    engine does not have and for values that it refuses.
    """
    given = _given_values(setup, hidden_size)
    fields: dict[str, object] = {"overlap_comm": setup.zero_stage is ZeroStage.PARAMETERS}
    for name, value in given.items():
        if name in MODELLED and value is not None:
            field, read = MODELLED[name]
            fields[field] = read(name, value)
    if setup.chosen_quantization is not None:
        if fields.get("zero_init"):
            msg = "engine_options: zero_init: a quantized base is loaded whole before it is sharded"
            raise SetupError(msg)
        fields["zero_init"] = False
    if "partition_method" in fields and setup.pipeline is None:
        msg = "engine_options: partition_method: is of pipelines; say pipeline_parallel"
        raise SetupError(msg)
    if given.get("offload_optimizer.super_offload") is True and not given.get("gradient_clipping"):
        fields["steps_beside_backward"] = setup.zero_stage is ZeroStage.PARAMETERS
    options = replace(DeepSpeedOptions(), **fields)  # type: ignore[arg-type]
    _check_sizes(setup, options)
    left_out, unsaved = _unmodelled(setup, given)
    return _without_combinations(setup, options, left_out, unsaved)


def _given_values(setup: TrainingSetup, hidden_size: int) -> dict[str, object]:
    """What is said, ``"auto"`` filled in. Raises ``SetupError`` for names that the engine does not have."""
    auto = _auto_values(hidden_size)
    found: dict[str, object] = {}
    for name, given in dict(setup.engine_options).items():
        found[name] = auto.get(name) if given == AUTO else given
        if given == AUTO and found[name] is None:
            msg = f"engine_options: {name} has no automatic value; only {', '.join(auto)} have"
            raise SetupError(msg)
        is_read = name in MODELLED or name in UNMODELLED or name in WITHOUT_EFFECT
        if not (is_read or says_loading(name, setup) or says_quantization(name, setup)):
            msg = f"engine_options: deepspeed has no {name}.{did_you_mean(name, OPTION_NAMES)}"
            raise SetupError(msg)
    return found


def _unmodelled(setup: TrainingSetup, given: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """What is said to no effect here: settings of a step, and of saving."""
    left_out: list[str] = []
    unsaved: list[str] = []
    for name, value in given.items():
        acts = setup.zero_stage is ZeroStage.PARAMETERS or name not in _STAGE_3_ONLY
        if name in UNMODELLED and acts and value not in (None, UNMODELLED[name]):
            (unsaved if name in _SAVING else left_out).append(f"{name}={value} (not modelled)")
    return left_out, unsaved


def _check_sizes(setup: TrainingSetup, options: DeepSpeedOptions) -> None:
    ranks, among = setup.data_parallel, options.hpz_partition_size
    if setup.zero_stage is ZeroStage.PARAMETERS and ranks % among:
        msg = f"engine_options: zero_hpz_partition_size: {ranks} ranks are no multiple of {among}"
        raise SetupError(msg)
    if not options.reduce_bucket_size:
        msg = "engine_options: reduce_bucket_size must be at least 1"
        raise SetupError(msg)


def _without_combinations(
    setup: TrainingSetup, options: DeepSpeedOptions, left_out: list[str], unsaved: list[str]
) -> DeepSpeedOptions:
    """The options with what is modelled only for some setups left out of them, and named."""
    offloads = setup.offload_optimizer is not Offload.NONE
    if setup.pipeline is not None:
        # "Pipeline parallelism does not support overlapped communication, will be disabled"
        options = replace(options, overlap_comm=False)
    if not options.contiguous_gradients and setup.zero_stage is not ZeroStage.PARAMETERS:
        # With the optimizer on the CPU the engine turns it on again.
        if not offloads and setup.zero_stage is not ZeroStage.NONE:
            unsaved.append("contiguous_gradients=False (modelled for stage 3 only)")
        options = replace(options, contiguous_gradients=True)
    if options.bf16_masters != options.bf16_states and not offloads:
        msg = (
            "engine_options: bf16_master_weights_and_grads and bf16_optimizer_states go together "
            "unless the optimizer is offloaded: DeepSpeed refuses one without the other"
        )
        raise SetupError(msg)
    if options.bf16_masters and (offloads or setup.zero_stage is ZeroStage.NONE):
        unsaved.append("bf16_master_weights_and_grads=True (modelled without offload only)")
        options = replace(options, bf16_masters=False, bf16_states=False)
    return replace(options, left_out=tuple(left_out), unsaved=tuple(unsaved))


def _auto_values(hidden_size: int) -> dict[str, object]:
    square = hidden_size * hidden_size
    return {
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * hidden_size,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
