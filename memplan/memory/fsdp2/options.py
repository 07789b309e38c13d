"""What ``fully_shard`` and the code bases around it are set to."""

from enum import Enum

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import (
    FP8_ALL_GATHER,
    OptionReader,
    option_names,
    reduces_each_micro_batch,
)
from memplan.training.choices import FsdpStrategy, Offload
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup
from memplan.training.setup_derived import IN_CLASSES, LEAVES_MIXERS, ROTATION
from memplan.training.splitting.context_parallel import RotateMethod


class Wrapping(Enum):
    """Which modules are units of their own."""

    LAYERS = "layers"
    """Each layer; everything else belongs to the root."""
    ACCELERATE = "accelerate"
    """Each layer, the embedding, and final norm with output matrix, which stay gathered (accelerate
    1.15, ``fsdp2_prepare_model``)."""
    TORCHTITAN = "torchtitan"
    """The same units (torchtitan 0.3.0, ``apply_fsdp``)."""


class StateDictType(Enum):
    """How a checkpoint is written."""

    FULL = "full_state_dict"
    """Gathered tensor by tensor and kept by rank 0 on the CPU."""
    SHARDED = "sharded_state_dict"
    """Every rank writes its own shards."""


class InitDevice(Enum):
    """Where the whole model lies before it is sharded."""

    CPU = "cpu"
    """Each rank loads all of it into CPU RAM, and its units pass over the GPU one by one."""
    META = "meta"
    """Nowhere: each tensor comes to the GPU whole, and is cut there (accelerate's
    ``cpu_ram_efficient_loading``, with which one rank of the job reads them all; torchtune)."""
    TO_EMPTY = "to_empty"
    """Nowhere: ``to_empty`` makes the shards on the GPU, where they are filled (torchtitan, prime-rl)."""
    CUDA = "cuda"
    """On the GPU."""


_UNSHARED = "engine_options: {}: no ranks share sequences: give context_parallel too"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fsdp2Options:
    """Settings that decide what FSDP2 holds; the field names are the option names."""

    reshard_after_forward: bool | None = True
    """A unit's gathered parameters are freed after its forward pass and gathered again for backward.
    ``auto``: torch's own default, every unit but the root."""
    reduce_dtype: DType | None = None
    """What gradients are reduced in; None: the format that they are computed in."""
    wrapping: Wrapping = Wrapping.LAYERS
    """Which modules are units of their own."""
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP)."""
    sync_each_batch: bool = True
    """Reduce at every micro-batch; else at the last one only, and whole gradients pile up. The
    default is the training loop's (``reduces_each_micro_batch``)."""
    reduce_scatter_max_input_buffers: int = 1
    """Reduce-scatter inputs that are kept alive (``set_reduce_scatter_max_input_buffers``)."""
    pin_memory: bool = True
    """Pin offloaded shards."""
    autocast: bool = False
    """The forward pass also runs under autocast."""
    enable_fsdp_float8_all_gather: bool = False
    """Linear layers' shards are cast to fp8 before they are gathered (torchao)."""
    init_device: InitDevice = InitDevice.CPU
    """Where the whole model lies before it is sharded."""
    state_dict_type: StateDictType = StateDictType.FULL
    """How a checkpoint is written."""
    frozen_dtype: DType | None = None
    """What weights that are not trained are kept in beside an adapter. None: the compute format, in which
    transformers loads them; verl loads them in fp32."""
    context_parallel_rotate_method: RotateMethod = RotateMethod.ALLGATHER
    """How keys and values of ranks that share sequences get about."""
    tensor_parallel_leaves_mixers: bool = False
    """Whether ranks that split layers have what stands in attention's place in some of them whole (NeMo AutoModel); transformers'
    plan splits its linear layers, too."""
    states_leave: bool = False
    """The optimizer's states are in CPU RAM between steps, and all of them on the GPU for each (prime-rl's
    ``CPUOffloadOptimizer``)."""
    context_parallel_in_classes: bool = False
    """Whether a model's own classes share sequences in every layer, with windows and recurrent states that they hand on, as NeMo
    AutoModel's and prime-rl's do."""

    @classmethod
    def of(cls, setup: TrainingSetup) -> "Fsdp2Options":
        """Read them from a setup.

        Raises ``SetupError`` for options that do not exist or cannot be.
        """
        read = OptionReader(setup, option_names(cls))
        wrapping = read.member("wrapping", Wrapping.LAYERS)
        made = cls(
            reshard_after_forward=_reshard(setup, read),
            reduce_dtype=read.dtype("reduce_dtype", _default_reduce_dtype(setup, wrapping)),
            wrapping=wrapping,
            data_parallel_replicate_degree=_replicas(setup, read),
            sync_each_batch=read.boolean("sync_each_batch", _reduces_each(setup, wrapping)),
            reduce_scatter_max_input_buffers=read.positive("reduce_scatter_max_input_buffers", 1),
            pin_memory=read.boolean("pin_memory", default=True),
            autocast=read.boolean("autocast", default=False),
            enable_fsdp_float8_all_gather=read.boolean(FP8_ALL_GATHER, default=False),
            init_device=read.member("init_device", _usual_place(setup)),
            state_dict_type=read.member("state_dict_type", StateDictType.FULL),
            frozen_dtype=read.dtype("frozen_dtype", None),
            states_leave=read.boolean("states_leave", default=False),
            context_parallel_rotate_method=_rotation(setup, read),
            tensor_parallel_leaves_mixers=read.boolean(LEAVES_MIXERS, default=False),
            context_parallel_in_classes=_in_classes(setup, read),
        )
        check_offload(setup)
        return made

    def shard_degree(self, setup: TrainingSetup) -> int:
        """Ranks over which each parameter is spread."""
        return setup.gradient_ranks // self.data_parallel_replicate_degree


def _reshard(setup: TrainingSetup, read: OptionReader) -> bool | None:
    strategy = setup.fsdp_strategy
    if strategy is FsdpStrategy.NO_SHARD:
        msg = (
            "fsdp_strategy: FSDP2 always shards; "
            "for whole parameters on each GPU take the engine ddp, or fsdp1 with no_shard"
        )
        raise SetupError(msg)
    keeps = strategy is FsdpStrategy.SHARD_GRAD_OP
    is_piped = setup.pipeline_parallel > 1
    if str(read.values.get("reshard_after_forward")).lower() in ("auto", "default"):
        return False if keeps or is_piped else None
    reshard: bool = read.boolean("reshard_after_forward", not keeps and not is_piped)
    if is_piped and reshard:
        msg = (
            "engine_options: reshard_after_forward: true is not modelled beside pipeline_parallel, where "
            "torchtitan's default is false: leave it out"
        )
        raise SetupError(msg)
    if keeps and reshard:
        msg = "fsdp_strategy: shard_grad_op means reshard_after_forward false; give one of the two"
        raise SetupError(msg)
    return reshard


def _in_classes(setup: TrainingSetup, read: OptionReader) -> bool:
    if read.values.get(IN_CLASSES) is not None and setup.context_parallel == 1:
        raise SetupError(_UNSHARED.format(IN_CLASSES))
    found: bool = read.boolean(IN_CLASSES, default=False)
    return found


def _rotation(setup: TrainingSetup, read: OptionReader) -> RotateMethod:
    if read.values.get(ROTATION) is not None and setup.context_parallel == 1:
        raise SetupError(_UNSHARED.format(ROTATION))
    return read.member(ROTATION, RotateMethod.ALLGATHER)


def _default_reduce_dtype(setup: TrainingSetup, wrapping: Wrapping) -> DType | None:
    """fp32 where the shards are fp32 (torchtitan); accelerate gives the compute format."""
    formats = PRECISIONS[setup.chosen_precision]
    if wrapping is Wrapping.ACCELERATE:
        return None
    return DType.FP32 if formats.weights is not formats.compute else None


def _reduces_each(setup: TrainingSetup, wrapping: Wrapping) -> bool:
    """The units say whose loop it is, where they are somebody's."""
    if wrapping is Wrapping.LAYERS:
        return reduces_each_micro_batch(setup)
    return wrapping is Wrapping.TORCHTITAN


def _replicas(setup: TrainingSetup, read: OptionReader) -> int:
    default = setup.nodes if setup.fsdp_strategy is FsdpStrategy.HYBRID else 1
    replicas = read.positive("data_parallel_replicate_degree", default)
    if setup.gradient_ranks % replicas:
        msg = (
            f"engine_options: data_parallel_replicate_degree: {setup.gradient_ranks} data-parallel "
            f"ranks cannot be split into {replicas} equal groups; give a divisor"
        )
        raise SetupError(msg)
    return replicas


def check_offload(setup: TrainingSetup) -> None:
    """Refuse what FSDP cannot offload.

    Raises ``SetupError``.
    """
    for name in ("offload_param", "offload_optimizer"):
        if getattr(setup, name) is Offload.NVME:
            msg = f"{name}: FSDP offloads to cpu only; deepspeed can use nvme"
            raise SetupError(msg)
    if setup.offload_optimizer is Offload.CPU and setup.offload_param is not Offload.CPU:
        msg = (
            "offload_optimizer: FSDP offloads parameters, gradients and optimizer states together; "
            "set offload_param to cpu"
        )
        raise SetupError(msg)


def _usual_place(setup: TrainingSetup) -> InitDevice:
    """Where the model lies: a quantized one on the GPU, where it is packed (transformers 5.23,
    ``Bnb4BitHfQuantizer.update_device_map``)."""
    return InitDevice.CPU if setup.chosen_quantization is None else InitDevice.CUDA
