"""What ``FullyShardedDataParallel`` is set to."""

from enum import Enum

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import (
    OptionReader,
    option_names,
    reduces_each_micro_batch,
)
from memplan.memory.fsdp2.options import InitDevice, StateDictType, check_offload
from memplan.training.choices import FsdpStrategy, Offload
from memplan.training.setup import TrainingSetup


class Prefetch(Enum):
    """When backward gathers the next unit."""

    PRE = "backward_pre"
    """Before the present unit's gradients are computed."""
    POST = "backward_post"
    """After the present unit's parameters are freed."""
    NONE = "no_prefetch"


class AutoWrap(Enum):
    """Which modules are units of their own."""

    LAYERS = "layers"
    """Each layer; everything else belongs to the root (``transformer_auto_wrap_policy``)."""
    NONE = "none"
    """None: the whole model is one unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fsdp1Options:
    """Settings that decide what FSDP1 holds; the field names are the option names."""

    reduce_dtype: DType | None = None
    """What gradients are reduced in; None: the format that they are computed in."""
    backward_prefetch: Prefetch = Prefetch.PRE
    forward_prefetch: bool = False
    """Gather one unit ahead in forward too."""
    use_orig_params: bool = False
    """The optimizer sees the original parameters. Then ``zero_grad`` does not free the flat
    gradients: they stay until the next forward pass begins."""
    limit_all_gathers: bool = True
    """Makes the CPU wait; what the allocator has handed out at one time is the same."""
    sync_module_states: bool = False
    """Broadcasts in place while the model is loaded."""
    wrapping: AutoWrap = AutoWrap.LAYERS
    """Which modules are units of their own."""
    sync_each_batch: bool = True
    """Reduce at every micro-batch; else at the last one only, and whole gradients pile up. The
    default is the training loop's (``reduces_each_micro_batch``)."""
    autocast: bool = False
    """The forward pass also runs under autocast (accelerate adds it)."""
    init_device: InitDevice = InitDevice.CPU
    """Where the whole model lies before it is sharded."""
    state_dict_type: StateDictType = StateDictType.FULL
    """How a checkpoint is written."""
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model; ``hybrid`` makes one for each node."""
    reentrant_checkpointing: bool = False
    """Layers are checkpointed as transformers before 5 did it (``use_reentrant``): then what a unit of
    frozen parameters was given, and its gradient, stay until the backward pass is over."""
    frozen_dtype: DType | None = None
    """What weights that are not trained are kept in beside an adapter. None: the compute format, in which
    transformers loads them; verl loads them in fp32."""

    @classmethod
    def of(cls, setup: TrainingSetup) -> "Fsdp1Options":
        """Read them from a setup.

        Raises ``SetupError`` for options that do not exist or cannot be.
        """
        read = OptionReader(setup, option_names(cls))
        hybrid = setup.fsdp_strategy is FsdpStrategy.HYBRID
        made = cls(
            reduce_dtype=read.dtype("reduce_dtype", None),
            backward_prefetch=read.member("backward_prefetch", Prefetch.PRE),
            forward_prefetch=read.boolean("forward_prefetch", default=False),
            use_orig_params=read.boolean("use_orig_params", default=False),
            limit_all_gathers=read.boolean("limit_all_gathers", default=True),
            sync_module_states=read.boolean("sync_module_states", default=False),
            wrapping=read.member("wrapping", AutoWrap.LAYERS),
            sync_each_batch=read.boolean(
                "sync_each_batch", default=reduces_each_micro_batch(setup)
            ),
            autocast=read.boolean("autocast", default=False),
            init_device=read.member("init_device", _usual_place(setup)),
            state_dict_type=read.member("state_dict_type", StateDictType.FULL),
            data_parallel_replicate_degree=read.positive(
                "data_parallel_replicate_degree", setup.nodes if hybrid else 1
            ),
            frozen_dtype=read.dtype("frozen_dtype", None),
            reentrant_checkpointing=read.boolean("reentrant_checkpointing", default=False),
        )
        _check(setup, made)
        if made.init_device is InitDevice.TO_EMPTY:
            msg = (
                "engine_options: init_device: to_empty is how FSDP2's shards are made; "
                "for fsdp1 write cpu, meta or cuda"
            )
            raise SetupError(msg)
        return made

    def shard_degree(self, setup: TrainingSetup) -> int:
        """Ranks over which each flat parameter is spread; one rank is never sharded."""
        if setup.fsdp_strategy is FsdpStrategy.NO_SHARD:
            return 1
        return setup.gradient_ranks // self.data_parallel_replicate_degree


def _check(setup: TrainingSetup, options: Fsdp1Options) -> None:
    check_offload(setup)
    replicas = options.data_parallel_replicate_degree
    if replicas > 1 and setup.fsdp_strategy is not FsdpStrategy.HYBRID:
        msg = (
            "engine_options: data_parallel_replicate_degree: FSDP1 has it with fsdp_strategy hybrid"
        )
        raise SetupError(msg)
    if setup.gradient_ranks % replicas:
        msg = (
            f"engine_options: data_parallel_replicate_degree: {setup.gradient_ranks} data-parallel "
            f"ranks cannot be split into {replicas} equal groups; give a divisor"
        )
        raise SetupError(msg)
    if setup.offload_param is Offload.CPU and options.shard_degree(setup) == 1:
        msg = "offload_param: FSDP1 does not offload whole parameters; shard over more GPUs"
        raise SetupError(msg)


def _usual_place(setup: TrainingSetup) -> InitDevice:
    """Where the model lies: a quantized one on the GPU, where it is packed (transformers 5.23,
    ``Bnb4BitHfQuantizer.update_device_map``)."""
    return InitDevice.CPU if setup.chosen_quantization is None else InitDevice.CUDA
