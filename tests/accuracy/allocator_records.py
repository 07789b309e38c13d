"""A record of PyTorch's own CUDA build as a training setup, with the kernels that users get."""

from functools import partial
from typing import Any

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.job import prepared, with_workspaces
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.account import ComponentKind, RankAccount
from memplan.memory.accounts import rank_account
from memplan.memory.fsdp2.units import is_tied
from memplan.memory.programs import program_of
from memplan.memory.programs.fully_sharded.program import Fsdp2Program
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.required import PlayedRun
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.deepspeed_records import flat_options
from tests.memory.capacities import bisected, in_steps, run_of

TASKS = {"causal": "causal-lm", "seq2seq": "seq2seq-lm", "mlm": "masked-lm"}
PRECISIONS = {
    "bf16": "bf16", "amp": "bf16-amp", "autocast": "bf16-autocast", "fp32": "fp32",
}  # fmt: skip
GPUS = {"h100": "h100-sxm-80gb", "a100": "a100-sxm4-80gb", "v100": "v100-sxm2-32gb"}
NO_ENGINE = "single"
NUM_MICRO_BATCHES = 4
"""Forward and backward passes of a record that does not say how many steps it ran."""


def engine_of(settings: dict[str, Any]) -> str:
    """The record's engine, as the record calls it; a loop without one is ``single``."""
    name: str = settings.get("engine", NO_ENGINE)
    return name


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    """The record's settings in memplan's words."""
    return TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        attention=settings.get("attn", "sdpa"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        optimizer=settings.get("opt", "adamw_fused").replace("_", "-"),
        num_gpus=settings.get("world", 1),
        **_engine_fields(settings),
    )


def _engine_fields(settings: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(settings)
    if engine == "fsdp2":
        return {
            "engine": "fsdp",
            "engine_options": {
                "reshard_after_forward": settings["reshard"],
                "reduce_dtype": "fp32" if settings["reduce_fp32"] else "bf16",
            },
        }
    if engine == "deepspeed":
        return {
            "engine": "deepspeed",
            "zero_stage": settings["stage"],
            "precision": f"{settings.get('prec', 'bf16')}-master",
            "gradient_accumulation_steps": settings.get("ga", 1),
            "engine_options": {
                "zero_init": settings.get("zinit", False),
                **flat_options(settings.get("ds", {})),
            },
        }
    return {
        "engine": "ddp",
        "precision": PRECISIONS[settings["precision"]],
        "engine_options": settings.get("ddp", {}),
    }


def peak_of(record: dict[str, Any]) -> int:
    """The peak of the record's job on the record's card, as ``peak_bytes`` counts it, for rank 0."""
    settings = record["settings"]
    model = load_model(record["config"], TASKS[record.get("task", "causal")])
    gpu = load_gpu(GPUS[settings["gpu"]])
    setup = setup_of(settings)
    if engine_of(settings) != "deepspeed":
        return estimate(model, setup, gpu).peak_bytes
    resolved = setup.resolve(model.context_length)
    tape, passes = record_and_walk(model, tape_options(resolved, gpu))
    given = RankInput(tape=tape, passes=passes, setup=resolved)
    account = with_workspaces(rank_account(given, rank=0), workspace_bytes(gpu.compute_capability))
    if not steps_were_seen(settings):
        return _peak_without_states(account)
    return account.peak.peak_bytes


def steps_were_seen(settings: dict[str, Any]) -> bool:
    """Whether a micro-batch was run after the first optimizer step, which makes the states."""
    return int(settings.get("ga", 1)) < NUM_MICRO_BATCHES


def _peak_without_states(account: RankAccount) -> int:
    label = ComponentKind.OPTIMIZER_STATES.label
    phases = [each for each in account.phases if each.name in ("forward", "backward")]
    return max(each.peak_bytes - each.components.get(label, 0) for each in phases)


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    return {"requested_peak": peak_of(record)}


def played(record: dict[str, Any]) -> PlayedRun | None:
    """The record's run of rank 0, played out; None where its engine cannot be yet."""
    ledger = ledger_of(record)
    return PlayedRun(lambda: run_of(ledger)) if ledger is not None else None


def ledger_of(record: dict[str, Any]) -> Ledger | None:
    """Its events."""
    settings = record["settings"]
    model = load_model(record["config"], TASKS[record.get("task", "causal")])
    gpu = load_gpu(GPUS[settings["gpu"]])
    setup = setup_of(settings)
    resolved = setup.resolve(model.context_length, has_bf16=True)
    given = prepared(model, resolved, gpu).rank_input
    ledger = Ledger()
    workspace = workspace_bytes(gpu.compute_capability) // NUM_HANDLES
    program = program_of(given, ledger, workspace_bytes=workspace)
    if program is None:
        return None
    if engine_of(settings) == "fsdp2":
        program.load = partial(load_empty, program)  # type: ignore[method-assign]
    if engine_of(settings) == "deepspeed":
        program.load_model = partial(_cast_model, program)  # type: ignore[method-assign]
    program.run(num_steps=_num_steps(settings))
    return ledger


def load_empty(program: Program) -> None:
    """These records make the shards with ``to_empty``, a tied table twice, and then tie it anew."""
    assert isinstance(program, Fsdp2Program)
    start = len(program.ledger.events)
    for weight in program.weights:
        program.load_shard(weight)
    if is_tied(program.given.tape):
        program.ledger.use(program.ledger.events[start])
    program.tables.load_all()


def _cast_model(program: Program) -> dict[Weight, Block]:
    """These records make the model in fp32 on the GPU, and cast it weight by weight."""
    ledger = program.ledger
    whole = {each: ledger.allocate(4 * each[0].numel) for each in program.weights}
    made = {}
    for each in program.weights:
        made[each] = ledger.allocate(each[0].storage.num_bytes)
        ledger.free(whole[each])
    program.tables.load_all()
    return made


def replayed(record: dict[str, Any]) -> dict[str, int]:
    """What the allocator reserves for the record's run."""
    run = played(record)
    if run is None:
        msg = "its engine's run cannot be played out yet"
        raise SetupError(msg)
    return {"reserved_peak": run.peaks.reserved_bytes}


def searched(record: dict[str, Any]) -> dict[str, int]:
    """The same, and the least capacity with which as many steps as the record's complete."""
    ledger = ledger_of(record)
    if ledger is None:
        msg = "its engine's run cannot be played out yet"
        raise SetupError(msg)
    reserved = run_of(ledger).on_card(None).reserved_bytes
    least = bisected(in_steps(ledger, _num_steps(record["settings"])))
    return {"reserved_peak": reserved, "least_capacity": least}


def _num_steps(settings: dict[str, Any]) -> int:
    steps: int = settings.get("steps", NUM_MICRO_BATCHES)
    if engine_of(settings) == "deepspeed":
        steps = max(1, NUM_MICRO_BATCHES // settings.get("ga", 1))
    return steps
