"""``memplan verify``."""

from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.taking import NO_VALUES, OPTIONAL_MODEL, Context, takes
from memplan.options.panels import HARDWARE_PANEL, OUTPUT_PANEL
from memplan.options.questions import SETTINGS
from memplan.options.rows.settings import setting_fields
from memplan.options.rows.shared import (
    ENGINE,
    ENGINE_OPTION,
    FILES,
    FORMAT,
    FSDP_STRATEGY,
    LAUNCH_FILES,
    NODES,
    NUM_LABELS,
    PRECISION,
    TASK,
    ZERO,
    OutputFormat,
)
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memplan.estimator.measured import Measurement
    from memplan.report.verify import Verified
    from memplan.training.setup import TrainingSetup
    from memplan.verify.run import Run

DEFAULT_GPU = "a100-80gb"
"""What is pretended where there is none."""
GPUS = Option(
    flag="--gpus", kind=int | None, metavar="N", minimum=1, panel=HARDWARE_PANEL,
    help_text="GPUs in all. [default: as many as torchrun started, else 1]",
)  # fmt: skip
GPU = Option(
    flag="--gpu", kind=str | None, panel=HARDWARE_PANEL,
    help_text="The card to pretend where there is none. [default: a100-80gb]",
)  # fmt: skip
SETUP = (
    GPUS, NODES, GPU, ENGINE, ZERO, FSDP_STRATEGY, *SETTINGS, ENGINE_OPTION, PRECISION, *FILES,
    *LAUNCH_FILES, TASK, NUM_LABELS,
)  # fmt: skip
"""What is trained."""
RUN = (
    Option(
        flag="--steps", kind=int | None, metavar="N", minimum=2, maximum=100, panel=OUTPUT_PANEL,
        help_text="Optimizer steps; the last is measured. [default: 8, and 3 on fake tensors]",
    ),
    Option(
        flag="--fake", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Follow the code on fake tensors although there is a GPU.",
    ),
    Option(
        flag="--record", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Write the measurement down, for others: measurement.json.",
    ),
    Option(
        flag="--replay", kind=list[str] | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Predict what was recorded once more, instead of training; needs no torch. "
        "Repeatable, or a folder.",
    ),
    Option(
        flag="--snapshot", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Keep the run's memory snapshot, and the predicted one beside it: run.pickle and "
        "run.predicted.pickle.",
    ),
    Option(
        flag="--calibrate", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Time this node's products, bandwidths, launches, copies and collectives in place of a model, for "
        "--calibration of every command.",
    ),
    Option(
        flag="--within", kind=str | None, metavar="SHARE", panel=OUTPUT_PANEL,
        help_text="Fail (exit 5) where a peak is further off, or a verdict is wrong: 1%.",
    ),
)  # fmt: skip
"""How it is run, and what is kept of it."""


@takes(*SETUP, *RUN, FORMAT, argument=OPTIONAL_MODEL)
def verify(ctx: Context, model: str | None = None, values: Values = NO_VALUES) -> None:
    """Train a few real steps, or follow them on fake tensors: predicted beside measured."""
    from memplan.cli.words.unused import refuse_unused
    from memplan.options.axes import parse_share

    if values["calibrate"] is not None:
        from memplan.cli.output.calibrating import calibrate

        refuse_unused(ctx, "--calibrate", {"calibrate"})
        calibrate(Path(values["calibrate"]))
        return
    within = values["within"]
    share = None if within is None else parse_share(within, option="--within")
    if values["replay"]:
        from memplan.verify.replay import replayed

        refuse_unused(ctx, "--replay", REPLAY_USES)
        runs = [replayed(path) for path in _files(list(map(Path, values["replay"])))]
    else:
        run = _ran(ctx, model, values)
        if run is None:
            return  # another rank speaks
        runs = [run]
    _show(runs, values["format"])
    if share is not None:
        _judge(runs, share, within or "")
    if not values["replay"] and runs[0].measured.death is not None and _started_processes() > 1:
        from memplan.errors import CheckFailedError

        # The others wait for this rank: torchrun ends them where it fails.
        msg = f"rank {runs[0].measured.rank} ran out of memory, as said above: the others are ended"
        raise CheckFailedError(msg)


def _ran(ctx: Context, model: str | None, values: Values) -> "Verified | None":
    """What was run here, beside what was predicted; None on a rank that is not the one to speak."""
    from memplan.cli.words.unused import refuse
    from memplan.verify.replay import beside

    kept = None if values["snapshot"] is None else Path(values["snapshot"])
    setup = _setup(ctx, model, values)
    if values["fake"] and kept is not None:
        refuse("--fake", ["--snapshot, of which fake tensors have none"])
    run = run_of(
        model, setup, task=values["task"], num_labels=values["num_labels"], steps=values["steps"]
    )
    measured = measure_here(run, gpu=values["gpu"], fake=values["fake"], snapshot=kept)
    if measured is None:
        return None
    if values["record"] is not None:
        _write(measured, Path(values["record"]))
    found = beside(measured)
    if kept is not None:
        _write_predicted(found, kept)
    return found


REPLAY_USES = frozenset({"replay", "format", "within"})
"""What recorded runs leave open."""


def _started_processes() -> int:
    """As many as torchrun started; 1 where it did not."""
    import os

    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def _setup(
    ctx: Context, model: str | None, values: Values
) -> "tuple[TrainingSetup, str | Mapping[str, object] | None]":
    """The one setup that the options say, and the model that a file names."""
    from dataclasses import replace

    from memplan.cli.words.asked import asked_of
    from memplan.options.engine_options import parse_engine_options
    from memplan.options.setup_files import read_base
    from memplan.options.single import with_engine

    engine, precision, zero = values["engine"], values["precision"], values["zero"]
    given = asked_of(ctx).given_fields(
        {
            "num_nodes": values["nodes"],
            "engine_options": parse_engine_options(values["engine_option"]),
            **setting_fields(values),
        }
    )
    given["num_gpus"] = _started_processes() if values["gpus"] is None else values["gpus"]
    base = read_base(
        given,
        named={"engine": engine, "precision": precision},
        setup_file=values["setup"],
        model=model,
        **{option.parameter: values[option.parameter] for option in (*FILES[1:], *LAUNCH_FILES)},
    )
    setup = with_engine(base.setup, precision=precision, engine=engine, zero=zero)
    if values["fsdp_strategy"] is not None:
        setup = replace(setup, fsdp_strategy=values["fsdp_strategy"])
    return setup, base.model


def run_of(
    model: str | None,
    asked: "tuple[TrainingSetup, str | Mapping[str, object] | None]",
    *,
    task: str | None,
    num_labels: int | None,
    steps: int | None,
) -> "Run":
    """What is to be run. Raises a ``MemplanError`` for what verify does not run."""
    from memplan.errors import UsageError
    from memplan.sources.about_models.found_config import local_config
    from memplan.sources.models import load_model
    from memplan.verify.run import Run
    from memplan.verify.scope import check_model, check_scope, loaded_whole

    setup, named_model = asked
    chosen = model or named_model
    if chosen is None:
        msg = (
            "name a MODEL (memplan models lists the built-in ones), or recorded runs with --replay"
        )
        raise UsageError(msg)
    if isinstance(chosen, str):
        name, config = local_config(chosen)
    else:
        name, config = str(chosen.get("name", "config")), chosen
    spec = load_model(chosen, task, num_labels=num_labels)
    if num_labels is not None:
        config = {**config, "num_labels": num_labels}
    resolved = setup.resolve(spec.context_length, family=spec.family)
    check_model(spec)
    check_scope(resolved, has_gpu=True)
    return Run(
        config=config, name=name, model=spec, setup=loaded_whole(resolved),
        num_steps=steps,
    )  # fmt: skip


def measure_here(
    run: "Run", *, gpu: str | None, fake: bool, snapshot: Path | None
) -> "Measurement | None":
    """Train on the card that is here, or follow; None on a rank that is not the one to speak."""
    from dataclasses import replace

    from memplan.errors import UsageError
    from memplan.sources.cards.catalog import load_gpu
    from memplan.verify.run import require_packages
    from memplan.verify.scope import check_scope

    pretended = load_gpu(gpu or DEFAULT_GPU)
    require_packages()
    _settle_allocator(run.setup)

    from memplan.verify.on_torch.card import has_card

    if has_card() and not fake:
        if gpu is not None:
            msg = "--gpu: names a card to pretend, and there is a real one: leave it out, or add --fake"
            raise UsageError(msg)
        return _on_card(run, snapshot)
    if snapshot is not None:
        msg = "--snapshot: there is no GPU, and fake tensors have no allocator: memplan explain --snapshot"
        raise UsageError(msg)
    check_scope(run.setup, has_gpu=False)
    from memplan.verify.on_torch.measuring import follow

    # What kernels need inside does not show where none runs.
    return follow(replace(run, setup=replace(run.setup, kernel_scratch=False)), pretended)


def _settle_allocator(setup: "TrainingSetup") -> None:
    """torch reads the allocator's kind where it is imported."""
    import os

    from memplan.training.choices import AllocatorKind

    if setup.allocator is AllocatorKind.EXPANDABLE:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _on_card(run: "Run", snapshot: Path | None) -> "Measurement | None":
    """The fullest rank's, on the rank that speaks: the first, or one that ran out of memory."""
    from memplan.verify.on_torch.measuring import fullest, measure_on_card
    from memplan.verify.on_torch.processes import rank_and_size

    rank, _ = rank_and_size() or (0, 1)
    worst = fullest(measure_on_card(run, snapshot=snapshot if rank == 0 else None))
    return worst if rank == 0 or worst.death is not None else None


def _files(paths: "Sequence[Path]") -> "list[Path]":
    """The files named, and those of the folders named, in the order of their names."""
    from memplan.errors import UsageError

    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not found:
        msg = f"--replay: {paths[0]}: the folder holds no .json"
        raise UsageError(msg)
    return found


def _write(measured: "Measurement", path: Path) -> None:
    from memplan.cli.output.terminal import remark, write_file
    from memplan.report.rows.written import json_text
    from memplan.sources.measurement_file import measurement_values

    text = json_text(measurement_values(measured), indent=1)
    write_file(path, f"{text}\n", option="--record")
    remark(
        f"wrote {path}; to send it, add it to tests/measured/sent in a pull request, or to an issue"
    )


def _write_predicted(run: "Verified", snapshot: Path) -> None:
    """The predicted run's snapshot beside the real one's."""
    from memplan.cli.output.terminal import remark, write_bytes
    from memplan.estimator.named_run import named_run
    from memplan.memory.snapshots.snapshot import snapshot_of
    from memplan.sources.snapshot_file import snapshot_pickle

    path = snapshot.with_suffix(f".predicted{snapshot.suffix}")
    write_bytes(path, snapshot_pickle(snapshot_of(named_run(run.estimate))), option="--snapshot")
    remark(f"wrote {snapshot} and {path}: both open in pytorch.org/memory_viz")


def _show(runs: "Sequence[Verified]", output_format: OutputFormat) -> None:
    from memplan.cli.output.terminal import say
    from memplan.report.rows.written import rows_csv, rows_json, rows_markdown
    from memplan.report.verify import (
        VERIFY_SCHEMA_VERSION,
        print_verified,
        summary_line,
        verify_rows,
    )

    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        console = TerminalConsole()
        for number, run in enumerate(runs):
            if number:
                console.print()
            print_verified(console, run)
        if len(runs) > 1:
            say(f"\n{summary_line(runs)}")
        return
    rows = verify_rows(runs)
    if output_format is OutputFormat.JSON:
        said = dict.fromkeys(text for run in runs for text in run.estimate.assumptions)
        say(rows_json(rows, schema_version=VERIFY_SCHEMA_VERSION, assumptions=list(said)))
    else:
        say(rows_csv(rows) if output_format is OutputFormat.CSV else rows_markdown(rows))


def _judge(runs: "Sequence[Verified]", share: float, within: str) -> None:
    """Raise ``CheckFailedError`` where a run is further off than that."""
    from memplan.errors import CheckFailedError

    worst = max((abs(error) for run in runs for error in run.peak_errors), default=0.0)
    wrong = [run for run in runs if not run.is_agreed]
    if worst > share or wrong:
        told = f"{len(wrong)} verdicts are wrong, and " if wrong else ""
        msg = f"--within {within}: {told}the worst peak is {100 * worst:.3f} % off"
        raise CheckFailedError(msg)
