"""A user's own ``torch.nn.Module`` written down as a program that memplan plays (optional: needs torch).

The module is run on the meta device: no weight is read, nothing is computed, and no code runs but the
module's own. What comes out is a ``ModelSpec`` like any other: every engine, precision, checkpointing, batch
and sweep works on it; ``save_tape`` writes it to a file that memplan reads without torch.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.errors import UsageError
from memplan.model.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["save_tape", "trace"]


def trace(
    module: Any,
    example_inputs: "Mapping[str, Any] | Sequence[Any]",
    *,
    name: str | None = None,
) -> ModelSpec:
    """Write down what a ``torch.nn.Module`` does with a batch, as a model that memplan estimates.

    ``example_inputs`` are its arguments, by name or in order, on any device; their first dimension is the
    batch, the second of those with two or three the sequence (the target's, where the module is an encoder
    and a decoder and the name begins with ``labels`` or ``decoder_``). The module returns its loss: as
    ``.loss``, ``["loss"]``, or a tensor of one element. Layers are the members of its ``ModuleList``s.

    Raises ``TraceError`` where it does something else for another batch, or returns no loss; ``UsageError``
    without torch.

        model = memplan.trace(MyModel(), {"input_ids": ids, "labels": ids})
        memplan.estimate(model, memplan.TrainingSetup(precision="bf16", micro_batch_size=8), gpu="h100")
    """
    try:
        from memplan.tracing.on_torch.trace import trace as traced
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        msg = (
            "trace: torch is not installed: pip install 'memplan[verify]'; its file is read without"
        )
        raise UsageError(msg) from None
    found: Any = traced(module, example_inputs, name=name)
    assert isinstance(found, ModelSpec)
    return found


def save_tape(model: ModelSpec, path: str | os.PathLike[str]) -> None:
    """Write a traced model to a JSON file, such as ``my_model.tape.json``: no weights, no code.

    Raises ``ConfigError`` for a model that was not traced.
    """
    from memplan.sources.about_models.tape_file import tape_text

    Path(path).write_text(tape_text(model), encoding="utf-8")
