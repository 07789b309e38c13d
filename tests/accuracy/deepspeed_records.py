"""A DeepSpeed record as a training setup, and the figures that memplan gives for it."""

from typing import Any

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.account import RankAccount
from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

TASKS = {"causal": "causal-lm", "seq2seq": "seq2seq-lm"}
AUTO_KEYS = (
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
)  # fmt: skip


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    """The record's settings in memplan's words; kernels as fake tensors run them."""
    return TrainingSetup(
        num_gpus=settings["world"],
        engine="deepspeed",
        zero_stage=settings["stage"],
        precision=f"{settings['prec']}-master",
        micro_batch_size=settings["b"],
        gradient_accumulation_steps=settings["ga"],
        seq_len=settings["s"],
        checkpointing="full" if settings["ckpt"] else "none",
        offload_optimizer="cpu" if settings["offload_opt"] else "none",
        offload_param="cpu" if settings["offload_param"] else "none",
        engine_options=engine_options(settings),
        kernel_scratch=False,
    ).resolve()


def engine_options(settings: dict[str, Any]) -> dict[str, object]:
    """The overrides of the record's ds_config, flat."""
    options: dict[str, object] = {}
    if settings["buckets"] == "auto":
        options.update(dict.fromkeys(AUTO_KEYS, "auto"))
    elif isinstance(settings["buckets"], dict):
        options.update(settings["buckets"])
    if settings["overlap"] is not None:
        options["overlap_comm"] = settings["overlap"]
    options["zero_init"] = bool(settings["zinit"])
    if settings.get("opt") == "torch_adamw_fused":
        options["torch_adam"] = True
    options.update(flat_options(settings["extra"] or {}))
    return options


def flat_options(ds_config: dict[str, Any]) -> dict[str, object]:
    """A ds_config as memplan's flat engine options."""
    options: dict[str, object] = {}
    for key, section in ds_config.items():
        if key == "torch_autocast":  # over weights that are 16 bits already: nothing is cast
            continue
        if not isinstance(section, dict):
            options[key] = section
            continue
        for name, value in section.items():
            if isinstance(value, dict):
                options.update(
                    {f"{name}.{inner}": each for inner, each in value.items() if inner != "device"}
                )
            else:
                options[name] = value
    return options


def account_of(record: dict[str, Any], *, rank: int | None = None) -> RankAccount:
    """The account of the record's rank, or of another one."""
    setup = setup_of(record["settings"])
    task = TASKS[record["settings"].get("task", "causal")]
    model = load_model(record["config"], task)
    tape, passes = record_and_walk(model, tape_options(setup, None))
    given = RankInput(tape=tape, passes=passes, setup=setup)
    return rank_account(given, rank=record["settings"]["rank"] if rank is None else rank)


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    account = account_of(record)
    peaks = {phase.name: phase.peak_bytes for phase in account.phases}
    return {
        "before": account.held_bytes,
        "after_step": account.held_bytes,
        "peak_init": peaks["load"],
        "peak_forward": peaks["forward"],
        "peak_backward": peaks["backward"],
        "peak_step": peaks["step"],
        "peak": account.peak.peak_bytes,
        "cpu_peak_init": account.host.load_bytes,
        "cpu_after_step": account.host.held_bytes,
    }
