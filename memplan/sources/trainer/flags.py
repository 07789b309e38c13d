"""Single arguments of the Trainer in memplan's words: batches, checkpoints, compilation, kernels, evaluation, formats.

transformers 5.23, ``training_args.py``.
"""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import did_you_mean
from memplan.sources.trainer.keys import older_names, remarks, trl_config
from memplan.sources.trainer.launch import Loading
from memplan.sources.trainer.values import ArgumentValues
from memplan.text import shown
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import Recomputation
from memplan.training.choices_of_kernels.kernels import (
    FeedForwardKernel,
    KernelPreset,
    LossKernel,
    NormKernel,
    RotaryKernel,
)
from memplan.training.compilation import Compilation
from memplan.training.evaluation import Evaluation
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

_PRECISIONS = {
    ("bf16", Engine.DDP): Precision.BF16_AMP,
    ("bf16", Engine.DEEPSPEED): Precision.BF16_MASTER,
    ("bf16", Engine.MEGATRON): Precision.BF16_MASTER,
    ("bf16", Engine.FSDP): Precision.BF16_MIXED,
    ("bf16", Engine.FSDP1): Precision.BF16_MIXED,
    ("fp16", Engine.DDP): Precision.FP16_AMP,
    ("fp16", Engine.DEEPSPEED): Precision.FP16_MASTER,
    ("fp16", Engine.MEGATRON): Precision.FP16_MASTER,
    ("fp16", Engine.FSDP): Precision.FP16_MIXED,
    ("fp16", Engine.FSDP1): Precision.FP16_MIXED,
}
"""What a flag means under each engine, for a model that is loaded in fp32."""
_CHECKPOINT_OPTIONS = (
    "every_n_layers", "offload", "use_reentrant", "preserve_rng_state", "determinism_check",
    "debug", "early_stop",
)  # fmt: skip
"""What ``activation_checkpointing_kwargs`` may hold: transformers' own, and torch's."""
_ACCELERATOR_OPTIONS = (
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
    "gradient_accumulation_kwargs", "use_configured_state",
)  # fmt: skip
_LIGER_FIELDS: dict[str, tuple[str, object]] = {
    "rope": ("rotary", RotaryKernel.EAGER),
    "rms_norm": ("norm", NormKernel.EAGER),
    "swiglu": ("mlp", FeedForwardKernel.EAGER),
    "geglu": ("mlp", FeedForwardKernel.EAGER),
    "relu_squared": ("mlp", FeedForwardKernel.EAGER),
}
"""What ``liger_kernel_config`` calls a kernel -> the field of a setup, and what it is without."""
_LIGER_OPTIONS = (*_LIGER_FIELDS, "layer_norm", "cross_entropy", "fused_linear_cross_entropy")
_EVALUATION_KEYS = (
    "eval_strategy", "evaluation_strategy", "evaluate_during_training", "eval_on_start",
)  # fmt: skip
"""Arguments, today's and older ones, that ask for evaluation while the model is trained."""
USUAL_EVAL_BATCH = 8
"""``per_device_eval_batch_size`` where it is not given (transformers 5.23, ``TrainingArguments``)."""
_ACCUMULATION_OPTIONS = (
    "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch",
)  # fmt: skip


class Flags(ArgumentValues):
    """One file of arguments, argument by argument."""

    def __init__(
        self,
        values: Mapping[str, object],
        base: TrainingSetup,
        given: Mapping[str, object],
        loading: Loading,
        *,
        source: str,
        folder: Path,
    ) -> None:
        super().__init__(values, source=source, folder=folder)
        self.base = base
        self.given = given
        self.trl = loading.trainer or trl_config(values, source=source)
        self.half_weights = loading.half_weights
        self.notes = [*older_names(values), *remarks(values)]

    def evaluation(self) -> Evaluation | None:
        """Batches between steps, where ``eval_strategy`` asks for them; ``do_eval`` alone runs none of these.

        Without ``compute_metrics``, which no file says, the loss alone is kept (``Trainer.evaluate``).
        """
        asked = [self.values.get(key) for key in _EVALUATION_KEYS]
        if all(value in (None, False, "no", "IntervalStrategy.NO") for value in asked):
            return None
        older = "per_gpu_eval_batch_size"
        key = older if older in self.values else "per_device_eval_batch_size"
        batch_size = self.count(key, default=USUAL_EVAL_BATCH)
        metrics = self.flag("batch_eval_metrics")
        steps = self.values.get("eval_accumulation_steps")
        if metrics:
            steps = 1
        elif steps is not None:
            steps = self.count("eval_accumulation_steps", default=1)
        kept = steps if not self.flag("prediction_loss_only") else None
        said = f"evaluation in batches of {batch_size}"
        if key not in self.values:
            said += " (the Trainer's default)"
        if kept is not None:
            said += f", logits of {kept} kept at once, as compute_metrics would have them"
        elif not self.flag("prediction_loss_only"):
            said += ", of which the loss is kept; with compute_metrics say how many batches' logits are kept too"
        self.notes.append(said)
        return Evaluation(batch_size=batch_size, batches_kept=kept or 0, accumulation_steps=steps)

    def liger(self) -> dict[str, object]:
        """Liger's kernels, and which of them ``liger_kernel_config`` leaves out.

        What it does not name is as Liger's function for the model's type has it by default.
        """
        config = self.nested("liger_kernel_config") or {}
        self._check_options("liger_kernel_config", config, _LIGER_OPTIONS)
        for name, value in config.items():
            if not isinstance(value, bool):
                self.refuse(f"liger_kernel_config.{name}", "write true or false")
        if not (self.flag("use_liger_kernel") or self.flag("use_liger")):
            if config:
                self.notes.append("liger_kernel_config does nothing without use_liger_kernel")
            return {}
        found: dict[str, object] = {"kernels": KernelPreset.LIGER}
        for name, (field, eager) in _LIGER_FIELDS.items():
            if config.get(name) is False:
                found[field] = eager
        whole = config.get("cross_entropy", False)
        if config.get("fused_linear_cross_entropy", True):
            if whole:
                advice = "Liger takes either: write fused_linear_cross_entropy: false beside it"
                self.refuse("liger_kernel_config.cross_entropy", advice)
        else:
            found["loss"] = LossKernel.LIGER if whole else LossKernel.EAGER
        return found

    def per_device(self) -> int:
        """Sequences of a micro-batch on one GPU."""
        return self.count("per_device_train_batch_size", default=8)

    def given_or(self, name: str, default: object) -> object:
        """What was given beside the file, where it was."""
        value = self.given.get(name)
        return default if value is None else value

    def accumulation(self) -> int:
        """Micro-batches of one step, which two keys may say."""
        steps = self.count("gradient_accumulation_steps", default=1)
        more = self.accumulation_options().get("num_steps")
        if more in (None, 1, steps):
            return steps
        where = "accelerator_config.gradient_accumulation_kwargs.num_steps"
        if steps > 1 or isinstance(more, bool) or not isinstance(more, int) or more < 1:
            self.refuse(where, "write gradient_accumulation_steps instead")
        return more

    def accumulation_options(self) -> Mapping[str, object]:
        """What ``accelerator_config`` says of them."""
        config = self.nested("accelerator_config") or {}
        self._check_options("accelerator_config", config, _ACCELERATOR_OPTIONS)
        if config.get("split_batches"):
            advice = "is not modelled; write the batch of one GPU and leave it out"
            self.refuse("accelerator_config.split_batches", advice)
        kwargs = config.get("gradient_accumulation_kwargs") or {}
        where = "accelerator_config.gradient_accumulation_kwargs"
        if not isinstance(kwargs, Mapping):
            self.refuse(where, "write a mapping")
        self._check_options(where, kwargs, _ACCUMULATION_OPTIONS)
        return kwargs

    def _check_options(
        self, where: str, options: Mapping[str, object], known: tuple[str, ...]
    ) -> None:
        for name in options:
            if name not in known:
                guess = did_you_mean(str(name), known)
                self.refuse(f"{where}.{name}", f"there is no such setting.{guess}")

    def compilation(self) -> Compilation:
        """The whole model, by inductor; ``eager`` and ``aot_eager`` write every tensor as eager does."""
        backend = self.values.get("torch_compile_backend") or "inductor"
        if backend not in ("inductor", "eager"):
            self.refuse(
                "torch_compile_backend", f"{shown(backend)} is not modelled; inductor is, and eager"
            )
        return Compilation.MODEL if backend == "inductor" else Compilation.NONE

    def graphs(self) -> tuple[str, ...]:
        """Modes of torch.compile that record CUDA graphs, which have a pool of their own."""
        mode = self.values.get("torch_compile_mode")
        if mode in (None, "", "default", "max-autotune-no-cudagraphs"):
            return ()
        return (f"torch_compile_mode {mode} (CUDA graphs' own pool)",)

    def compiles(self) -> bool:
        """Naming a backend or a mode turns it on (``__post_init__``)."""
        named = ("torch_compile_backend", "torch_compile_mode")
        return self.flag("torch_compile") or any(self.values.get(key) for key in named)

    def checkpointing(self) -> Recomputation:
        """transformers 5.23 renamed it, and the new name goes first (``__post_init__``)."""
        named = "activation_checkpointing"
        key = named if self.values.get(named) is not None else "gradient_checkpointing"
        if not self.flag(key, default=self.trl is not None):
            return Recomputation.NONE
        if key not in self.values:
            self.notes.append(f"gradient_checkpointing is on: {self.trl}'s default")
        options = self.nested(f"{key}_kwargs") or {}
        self._check_options(f"{key}_kwargs", options, _CHECKPOINT_OPTIONS)
        if options.get("every_n_layers") not in (None, 1):
            self.refuse(
                f"{key}_kwargs.every_n_layers", "changes memory and is not modelled; remove it"
            )
        return Recomputation.FULL

    def offloading(self) -> dict[str, object]:
        """What goes to CPU RAM between the passes: by TRL's hooks, or inputs of checkpointed layers
        (transformers 5.23, modeling_utils.py, ``_activation_checkpointing_enable``)."""
        if self.trl is not None and self.flag("activation_offloading"):
            return {"offload_activations": ActivationOffload.STREAMED}
        for name in ("gradient", "activation"):
            options = self.nested(f"{name}_checkpointing_kwargs") or {}
            if options.get("offload") and self.checkpointing() is not Recomputation.NONE:
                return {"offload_activations": ActivationOffload.CHECKPOINTS}
        return {}

    def is_reentrant(self) -> bool:
        """Whether layers are checkpointed as transformers before 5 did it where nothing was said."""
        options = [
            self.nested(f"{name}_checkpointing_kwargs") or {} for name in ("gradient", "activation")
        ]
        return any(each.get("use_reentrant") is True for each in options)

    def given_precision(self) -> Precision | None:
        """A precision that was named beside the file, which goes over its flags."""
        named = self.given.get("precision")
        value = getattr(named, "value", named)
        return next((each for each in Precision if each.value == value), None)

    def halves(self) -> list[str]:
        """The flag that is on, in the Trainer's words."""
        chosen = self.given_precision()
        if chosen is not None:
            plain = chosen in (Precision.FP32, Precision.BF16)
            return [] if plain else [chosen.value[:4]]
        halves = [name for name in ("bf16", "fp16") if self.flag(name)]
        if len(halves) == 2:
            self.refuse("fp16", "and bf16 are both true; the Trainer takes one")
        if self.trl is not None and not halves and self.values.get("bf16") is None:
            self.notes.append(f"bf16 is on: {self.trl}'s default")
            return ["bf16"]
        return halves

    def precision(self, engine: Engine) -> Precision:
        """What the flags mean under an engine, by how the model is loaded."""
        halves = self.halves()
        if self.half_weights and engine is Engine.DDP:
            return Precision.BF16_AUTOCAST if halves else Precision.BF16
        return _PRECISIONS[(halves[0], engine)] if halves else Precision.FP32
