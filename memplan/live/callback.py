"""``MemplanCallback``: the check where a Trainer begins, and beside its first steps what they really took.

transformers 5.23, ``trainer_callback.py``: ``CallbackHandler.call_event`` calls the event's method by its name, with the arguments, the state, the control
and by keyword the model, the optimizer and the loaders. It asks for no base class, so none is imported.
"""

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from memplan.hardware.gpu import GpuSpec
from memplan.live.checked import Checked, ForeseenOutOfMemoryError
from memplan.live.checking import Question, card_meant, check_arguments, world_size
from memplan.training.coercion import coerce_enum
from memplan.units import GIB

MEASURED_STEP = 3
"""The step behind which the peak is read: optimizer states are there from the second on."""


class OnOom(Enum):
    """What is done where the training would not fit."""

    RAISE = "raise"
    """It ends before its first step."""
    WARN = "warn"
    """It is said."""
    FIX = "fix"
    """Activations are checkpointed, where that is enough; else it ends."""


class MemplanCallback:
    """Checks a Trainer's run before its first step: ``Trainer(..., callbacks=[MemplanCallback()])``.

    ``on_oom``: ``"warn"`` says it, ``"raise"`` ends the run with what to change, ``"fix"`` switches checkpointing on where that is
    enough and ends it otherwise. ``gpu`` and ``seq_len`` are as in ``memplan.check``; ``say`` is what lines are printed with, on the
    first rank. ``checked`` is what was found.
    """

    def __init__(
        self,
        on_oom: str | OnOom = OnOom.WARN,
        *,
        gpu: str | GpuSpec | None = None,
        seq_len: int | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.on_oom = coerce_enum("on_oom", on_oom, OnOom)
        self.gpu, self.seq_len = gpu, seq_len
        self.say = say or _print
        self.checked: Checked | None = None
        self._is_measured = False

    def __getattr__(self, name: str) -> Any:
        """Every other event passes by."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,  # noqa: ARG002
        model: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Check; say what was found on the first rank. Raises ``ForeseenOutOfMemoryError`` as ``on_oom`` says."""
        asked = Question(seq_len=self.seq_len, gpu=card_meant(self.gpu), num_gpus=world_size())
        dataset = getattr(train_dataloader, "dataset", None)
        accelerate = sys.modules.get("accelerate.state")
        shared = getattr(getattr(accelerate, "AcceleratorState", None), "_shared_state", None)
        known = _Attributes(shared) if shared else None
        self.checked = check_arguments(model, args, asked, dataset=dataset, state=known)
        is_first = getattr(state, "is_world_process_zero", True)
        if self.checked.is_out_of_memory and self.on_oom is OnOom.FIX:
            self.checked = self._fixed(model, args, asked, dataset, known)
        if is_first:
            self.say(str(self.checked))
        if self.checked.is_out_of_memory and self.on_oom is not OnOom.WARN:
            raise ForeseenOutOfMemoryError("; ".join((self.checked.headline, *self.checked.advice)))

    def _fixed(self, model: Any, args: Any, asked: Question, dataset: Any, state: Any) -> Checked:
        """The same with checkpointing, switched on where it then fits."""
        assert self.checked is not None
        if args.gradient_checkpointing or not hasattr(model, "gradient_checkpointing_enable"):
            return self.checked
        _set_checkpointing(args, to=True)
        better = check_arguments(model, args, asked, dataset=dataset, state=state)
        if better.is_out_of_memory:
            _set_checkpointing(args, to=False)
            return self.checked
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
        )
        return better

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Once, behind the first steps: the measured peak beside the foreseen one."""
        if self._is_measured or self.checked is None or state.global_step < MEASURED_STEP:
            return
        self._is_measured = True
        torch = sys.modules.get("torch")
        if (
            torch is None
            or not torch.cuda.is_available()
            or not getattr(state, "is_world_process_zero", True)
        ):
            return
        measured, foreseen = (
            int(torch.cuda.max_memory_allocated()),
            self.checked.allocated_bytes,
        )
        if not measured:  # there is a card, and the training is not on it
            return
        share = (foreseen - measured) / measured
        self.say(
            f"memplan: peak allocated {measured / GIB:.2f} GiB measured, {foreseen / GIB:.2f} foreseen ({share:+.2%})"
        )


class _Attributes:
    """A shared state's entries as attributes; None for those that are not there."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        plugins = self._values.get("deepspeed_plugins") or {}
        if name == "deepspeed_plugin":
            return next(iter(plugins.values()), None)
        return self._values.get(name)


def _set_checkpointing(args: Any, *, to: bool) -> None:
    """Under the name that it has, and the one that it has from transformers 5.24 on."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, to)


def _nothing(*_: object, **__: object) -> None:
    """What other events do here."""


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
