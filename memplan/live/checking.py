"""``memplan.check``: a Trainer, or a model with its optimizer and a batch, as a setup."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.errors import GpuNotFoundError, UsageError
from memplan.estimator import estimate
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.live.checked import Checked
from memplan.live.data import batch_shape, longest
from memplan.live.engine import engine_fields
from memplan.live.lightning import is_lightning, lightning_run
from memplan.live.model import LiveModel, read_model
from memplan.live.optimizer import optimizer_fields
from memplan.model.spec import ModelSpec
from memplan.sources.about_models.plain import plain
from memplan.sources.adapter_config import adapter_from_mapping
from memplan.sources.gpus import load_gpu, load_gpus
from memplan.sources.models import load_model
from memplan.sources.trainer.launch import EngineFile, Loading
from memplan.sources.training_arguments import arguments_file
from memplan.training.choices import Recomputation
from memplan.training.choices_of_kernels.kernels import LossKernel, Packing
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCE = "the Trainer's arguments"
LIGHTNING_REMARK = (
    "Lightning lets a step's gradients go behind the next forward pass, not before it, which is not counted with this engine: a peak in "
    "forward is higher by up to all of them"
)
"""lightning 2.6, ``loops/optimization/automatic.py``: forward, ``zero_grad`` and backward are one closure."""
_NOT_ASKED = ("use_cpu", "no_cuda", "use_mps_device")
"""Arguments that say where this process trains; the question is what it would take on a card."""
_PURE = {
    "torch.bfloat16": Precision.BF16,
    "torch.float16": Precision.FP16,
    "torch.float32": Precision.FP32,
}
"""How a plain loop trains that says nothing else: in its weights' own format."""
_ATTENTIONS = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash3",
}


def check(
    trained: Any,
    optimizer: Any = None,
    *,
    batch: Any = None,
    seq_len: int | None = None,
    precision: str | None = None,
    gpu: str | GpuSpec | None = None,
    gpus: int | None = None,
) -> Checked:
    """Foresee the training at hand, before its first step.

    ``trained`` is a ``transformers.Trainer`` or one of TRL's, or a model (wrapped by DDP, FSDP2, DeepSpeed, peft, ``torch.compile`` or
    not), or what ``memplan.trace`` made of one. A model comes with its ``optimizer`` and a ``batch`` as the loop hands it over.
    ``seq_len`` and ``precision`` say what no object does, ``gpu`` which card is meant (by default the one here), ``gpus`` how many
    there are (by default what ``torch.distributed`` or ``WORLD_SIZE`` says). Raises a ``MemplanError`` for what cannot be read.

        memplan.check(trainer)                                  # prints nothing; print() it
        memplan.check(model, optimizer, batch=next(iter(loader)), precision="bf16-amp").verdict
    """
    asked = Question(
        seq_len=seq_len, precision=precision, gpu=card_meant(gpu), num_gpus=gpus or world_size()
    )
    if is_lightning(trained):
        return _check_lightning(trained, asked)
    if hasattr(trained, "args") and hasattr(trained, "model"):
        state = getattr(getattr(trained, "accelerator", None), "state", None)
        dataset = getattr(trained, "train_dataset", None)
        return check_arguments(trained.model, trained.args, asked, dataset=dataset, state=state)
    return _check_loop(trained, optimizer, batch, asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What was said beside the objects."""

    seq_len: int | None = None
    precision: str | None = None
    gpu: GpuSpec | None = None
    """None: there is no card, and none was named."""
    num_gpus: int = 1


def world_size() -> int:
    """Ranks of the job: torch's own count where its groups are there, else what launchers set."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if said.isdecimal() and int(said[:9]) else 1


def card_meant(gpu: str | GpuSpec | None) -> GpuSpec | None:
    """The card that is meant; the fullest of the first kind here, None where there is none."""
    if gpu is not None:
        return load_gpu(gpu) if isinstance(gpu, str) else gpu
    try:
        return load_gpus("local")[0]
    except GpuNotFoundError:
        return None


def check_arguments(
    model: Any, arguments: Any, asked: Question, *, dataset: Any = None, state: Any = None
) -> Checked:
    """The training of a model by a Trainer with these arguments."""
    live = read_model(model)
    spec = load_model(live.config)
    values = {
        key: value
        for key, value in plain(arguments.to_dict()).items()
        if value is not None and key not in _NOT_ASKED
    }
    if state is not None and "deepspeed" not in values:
        plugin = getattr(state, "deepspeed_plugin", None)
        values |= {"deepspeed": plain(plugin.deepspeed_config)} if plugin is not None else {}
    given = {"num_gpus": asked.num_gpus, "adapter": _adapter(live)}
    read = arguments_file(
        values,
        TrainingSetup(num_gpus=asked.num_gpus),
        source=SOURCE,
        folder=Path(),
        given={key: value for key, value in given.items() if value is not None},
        accelerate=_fsdp(state),
        loading=Loading(trainer=_trl_name(arguments), half_weights=live.is_half),
    )
    seq_len, remark = _length(read.setup, asked, dataset)
    setup = replace(read.setup, adapter=given["adapter"] or read.setup.adapter, seq_len=seq_len)
    if live.is_checkpointed and setup.checkpointing is Recomputation.NONE:
        # The model's own switch, which the Trainer leaves as it is (peft: prepare_model_for_kbit_training).
        setup = replace(setup, checkpointing=Recomputation.FULL)
    if _has_fused_head(arguments) and setup.loss is None:
        setup = replace(setup, loss=LossKernel.TRL)
    setup = _with(setup, asked, live)
    return _checked(spec, setup, asked, live, (*read.notes, *remark), is_trainer=True)


def _trl_name(arguments: Any) -> str | None:
    """TRL's class of arguments; None: transformers' own."""
    names = [each.__name__ for each in type(arguments).__mro__ if each.__module__.startswith("trl")]
    return names[0] if names else None


def _has_fused_head(arguments: Any) -> bool:
    """Whether TRL's trainer computes its loss tile by tile (trl 1.16, ``sft_trainer.py`` and ``dpo_trainer.py``: ``add_fused_lm_head``)."""
    if getattr(arguments, "label_smoothing_factor", 0) or _trl_name(arguments) is None:
        return False
    configs = [
        each.__module__ for each in type(arguments).__mro__ if each.__module__.startswith("trl")
    ]
    trainer = sys.modules.get(configs[0].replace("_config", "_trainer"))
    return hasattr(trainer, "add_fused_lm_head")


def _fsdp(state: Any) -> EngineFile | None:
    """accelerate's FSDP as its configuration file would say it (accelerate 1.15, ``FullyShardedDataParallelPlugin``)."""
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        return None
    version = int(getattr(plugin, "fsdp_version", 1))
    reshard = plugin.reshard_after_forward
    config: dict[str, object] = {
        "fsdp_version": version,
        "fsdp_reshard_after_forward": reshard
        if isinstance(reshard, bool)
        else str(getattr(reshard, "name", reshard)),
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": bool(
            getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload)
        ),
    }
    if version == 1:
        config |= {
            "fsdp_sharding_strategy": str(plugin.sharding_strategy.name),
            "fsdp_use_orig_params": bool(plugin.use_orig_params),
        }
        del config["fsdp_reshard_after_forward"]
    values = {
        "distributed_type": "FSDP",
        "mixed_precision": str(state.mixed_precision),
        "fsdp_config": config,
    }
    return EngineFile(values=values, source="accelerate's state")


def _check_lightning(trainer: Any, asked: Question) -> Checked:
    """Lightning's Trainer, once its strategy is set up."""
    run = lightning_run(trainer)
    if run.tokens is None and asked.seq_len is None:
        msg = "seq_len: the data does not say how long sequences are: give seq_len"
        raise UsageError(msg)
    asked = replace(
        asked,
        precision=asked.precision or run.precision,
        num_gpus=run.num_gpus,
        seq_len=asked.seq_len or run.tokens,
    )
    more = {
        "micro_batch_size": run.sequences,
        "gradient_accumulation_steps": run.accumulation,
        "gradients_held": run.holds_gradients,
    }
    found = _check_loop(run.model, run.optimizer, None, asked, **more)
    remarks = () if run.holds_gradients else (LIGHTNING_REMARK,)
    return replace(found, remarks=(*found.remarks, *remarks))


def _check_loop(
    trained: Any, optimizer: Any, batch: Any, asked: Question, **more: object
) -> Checked:
    """A loop of one's own; ``more`` are fields that are known besides."""
    shape = batch_shape(batch) if batch is not None else None
    if shape is None and asked.seq_len is None:
        msg = "batch: give the batch that the loop hands to the model (a mapping with input_ids), or seq_len"
        raise UsageError(msg)
    sequences, tokens = shape or (1, asked.seq_len or 1)
    live = None if isinstance(trained, ModelSpec) else read_model(trained)
    spec = trained if live is None else load_model(live.config)
    known = {
        "micro_batch_size": sequences,
        "seq_len": asked.seq_len or tokens,
        **optimizer_fields(optimizer),
        **more,
    }
    engine = {} if live is None else engine_fields(trained, num_gpus=asked.num_gpus, given=known)
    if asked.precision is None and live is not None:
        engine.setdefault("precision", _PURE.get(live.weights))
    setup = TrainingSetup(
        **{
            "num_gpus": asked.num_gpus,
            "adapter": None if live is None else _adapter(live),
            "checkpointing": _checkpointing(live),
            **known,
            **engine,
        }
    )
    remarks: Iterable[str] = ()
    if asked.precision is None and setup.chosen_engine is Engine.DDP and not setup.upcast_outputs:
        remarks = (
            "no autocast is taken for granted: say precision='bf16-amp' where the loop has it",
        )
    return _checked(spec, _with(setup, asked, live), asked, live, tuple(remarks), is_trainer=False)


def _checkpointing(live: LiveModel | None) -> Recomputation:
    """Whether transformers' model runs its layers again."""
    return Recomputation.FULL if live is not None and live.is_checkpointed else Recomputation.NONE


def _adapter(live: LiveModel) -> Any:
    if live.adapter is None:
        return None
    values = {key: value for key, value in live.adapter.items() if value is not None}
    return adapter_from_mapping(values, source="the model's adapter").adapter


def _with(setup: TrainingSetup, asked: Question, live: LiveModel | None) -> TrainingSetup:
    """What was said beside the objects, and how attention is computed."""
    changes: dict[str, Any] = {}
    if asked.precision is not None:
        changes["precision"] = asked.precision
    kernel = _ATTENTIONS.get(str(live.attention)) if live is not None else None
    if kernel is not None:
        changes["attention"] = kernel
    return replace(setup, **changes) if changes else setup


def _length(
    setup: TrainingSetup, asked: Question, dataset: Any
) -> tuple[int | None, tuple[str, ...]]:
    """How long sequences are, and how that is known."""
    if asked.seq_len is not None:
        return asked.seq_len, ()
    found = longest(dataset)
    if setup.seq_len is not None:
        # Rows that are filled are as long as they may be, whatever the examples are.
        is_shorter = found is not None and found < setup.seq_len and setup.packing is Packing.NONE
        return (found if is_shorter else setup.seq_len), ()
    if found is not None:
        return found, (
            f"sequences of {found:,} tokens: the longest of the data set's first examples",
        )
    return None, (
        "the data does not say how long sequences are: the model's context is taken, say seq_len",
    )


def _checked(
    spec: ModelSpec,
    setup: TrainingSetup,
    asked: Question,
    live: LiveModel | None,
    remarks: tuple[str, ...],
    *,
    is_trainer: bool,
) -> Checked:
    answer = estimate(spec, setup, asked.gpu)
    return Checked(
        estimate=answer, remarks=(*remarks, *_disagreements(answer, live)), is_trainer=is_trainer
    )


def _disagreements(answer: Any, live: LiveModel | None) -> tuple[str, ...]:
    """Where the model in memory has other parameters than the one that was estimated."""
    if live is None or not live.num_params:
        return ()
    found = []
    for words, there, told in (
        ("parameters", live.num_params, answer.num_params),
        ("trained parameters", live.trainable_params, answer.trainable_params),
    ):
        if there != told:
            found.append(f"the model has {there:,} {words}, {told:,} were estimated")
    return tuple(found)
