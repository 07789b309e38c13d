"""Unsloth's YAML (2026.10): what ``unsloth train --config FILE`` reads (``unsloth_cli/config.py``).

Its optimizer, precision and kernels are its own: where the setup has others they are named as set by hand, in a script
over ``FastLanguageModel``.
"""

from memplan.model.spec import ModelSpec
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.sources.emitters.trainer_values import (
    adapter_of,
    four_bits,
    is_int8,
    model_name,
    targets_of,
)
from memplan.training.adapters import DEFAULT_ALPHA, Lora
from memplan.training.choices import Recomputation
from memplan.training.choices_of_kernels.kernels import Packing
from memplan.training.jobs import PLAIN
from memplan.training.setup import TrainingSetup

_CHECKPOINTING = {Recomputation.FULL: "unsloth", Recomputation.NONE: "none"}


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the file of a setup that Unsloth's trainer runs, on one GPU."""
    _check_said(setup)
    adapter = adapter_of(setup)
    assert isinstance(setup.checkpointing, Recomputation)
    training: dict[str, object] = {
        "training_type": "full" if adapter is None else "lora",
        "load_in_4bit": four_bits(setup) is not None,
        "batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "gradient_checkpointing": _CHECKPOINTING[setup.checkpointing],
        "packing": setup.packing is Packing.DOCUMENTS,
    }
    if setup.seq_len is not None:
        training["max_seq_length"] = setup.seq_len
    values: dict[str, object] = {"model": model_name(model), "training": training}
    if adapter is not None:
        values["lora"] = _adapter(adapter)
    return Emitted(values=values, setup=setup, notes=("run it with: unsloth train --config FILE",))


def _check_said(setup: TrainingSetup) -> None:
    """Refuse what its command line does not run."""
    problems = (
        (setup.num_gpus > 1, "`unsloth train` runs on one GPU"),
        (setup.job is not PLAIN, "`unsloth train` knows fine-tuning on texts alone"),
        (is_int8(setup), "Unsloth's file has four bits a weight, not eight"),
        (setup.checkpointing not in _CHECKPOINTING, "Unsloth checkpoints all layers or none"),
    )
    for is_so, problem in problems:
        if is_so:
            raise refuse(problem)


def _adapter(adapter: Lora) -> dict[str, object]:
    targets = targets_of(adapter)
    if not isinstance(targets, list):
        msg = (
            "Unsloth's file lists modules by name: say `lora_targets="
            "'q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj'`"
        )
        raise refuse(msg)
    return {
        "lora_r": adapter.rank, "lora_alpha": int(adapter.alpha or DEFAULT_ALPHA), "lora_dropout": adapter.dropout,
        "target_modules": ",".join(targets), "use_rslora": adapter.rslora, "use_dora": adapter.dora,
    }  # fmt: skip
