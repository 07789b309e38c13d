"""What is asked of time: of a step, and of a whole run."""

from typing import TYPE_CHECKING, Any

from memplan.options.numbers import read_amount, read_rate, read_seconds, read_share
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from memplan.compute.host import HostSpeed
    from memplan.estimator import Estimate
    from memplan.estimator.time.evaluating import Evaluations
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.estimator.time.site import Site

TIME_PANEL = "Time and cost"


def _row(flag: str, kind: Any, metavar: str | None, help_text: str, **more: Any) -> Option:
    return Option(
        flag=flag, kind=kind, metavar=metavar, help_text=help_text, panel=TIME_PANEL,
        show_default=False, **more,
    )  # fmt: skip


def read_host(text: "str | float") -> "HostSpeed | float":
    """Read how fast a host is: a kind, or how many times as long as the usual one it takes.

    >>> read_host("slow"), read_host("1.5")
    (<HostSpeed.SLOW: 'slow'>, 1.5)
    """
    from memplan.compute.host import HostSpeed

    plain = str(text).strip().lower()
    if plain in {each.value for each in HostSpeed}:
        return HostSpeed(plain)
    try:
        factor = float(plain)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 100:
        msg = f"{text!r} is not a host: fast, usual, slow, or how many times as long as the usual one it takes, such as 1.5"
        raise ValueError(msg)
    return factor


TIME_OPTIONS: tuple[Option, ...] = (
    _row("--time", bool, None, "Tell how long a step takes, tokens per second and utilisation.",
         default=False),
    _row("--tokens", int | None, "N", "Tokens of the whole run, 300B or 1T: its days, GPU-hours and "
         "energy.", parser=read_amount),
    _row("--examples", int | None, "N", "Sequences of the whole run, in place of tokens.",
         parser=read_amount),
    _row("--epochs", float, "N", "How often they are gone through.", default=1.0),
    _row("--price", str | None, "PRICE", "Of one GPU's hour: 2.50, l4=0.80,a100=1.90, or a YAML file of prices "
         "by GPU: what the run costs."),
    _row("--save-every", float | None, "TIME", "Between two checkpoints of the run, 30m. [default: as least is lost by failures]",
         parser=read_seconds),
    _row("--failures-per-gpu-day", float | None, "N", "How often one GPU ends the run, 0.001: one in 1,000 days. [default: as published runs had it]"),
    _row("--eval-every", int | None, "N", "Steps between two evaluations of the run, with --eval-examples.", parser=read_amount),
    _row("--eval-examples", int | None, "N", "Sequences of one evaluation, all GPUs together.", parser=read_amount),
    _row("--loader", float | None, "N", "Samples that the data loaders of one node make ready in a second. [default: they keep up]"),
    _row("--mfu", float | None, "SHARE", "Utilisation that is known from elsewhere, 0.45: used in "
         "place of the model.", parser=read_share),
    _row("--network", float | None, "GBIT", "What one GPU sends to other nodes, in Gbit/s one way. "
         "[default: 400 on H100 and later, 200 on A100]", parser=read_rate),
    _row("--oversubscription", float, "N", "How many times as much 32 nodes send as their switches pass on to others.",
         default=1.0),
    _row("--in-network-reduction", bool, None, "The switches between nodes add up all-reduces (InfiniBand with SHARP, NCCL's CollNet).",
         default=False),
    _row("--host", float | None, "SPEED", "How fast the host launches kernels: fast, usual, slow (shared machines in a cloud), or how many "
         "times as long as the usual one it takes, 1.5. [default: usual]", parser=read_host),
    _row("--calibration", str | None, "FILE", "What a measured step says of the machines, as estimate --save-calibration writes it."),
)  # fmt: skip
"""Options of every command that judges setups."""
MEASURED_OPTIONS: tuple[Option, ...] = (
    _row("--measured-step", float | None, "TIME", "What a step of this very setup takes on this card, 3.1s: its time, and what explains it.",
         parser=read_seconds),
    _row("--save-calibration", str | None, "FILE", "Write what it explains, for --calibration of every command."),
)  # fmt: skip
"""Options of a command that judges one setup."""
_OF_A_RUN = ("tokens", "examples")


def _site(times: Values) -> "Site":
    from memplan.compute.host import HostSpeed
    from memplan.estimator.time.site import Site

    host, calibration = times.get("host"), None
    if times.get("calibration") is not None:
        from memplan.sources.cards.calibration_file import read_calibration

        calibration = read_calibration(times["calibration"])
        if host is not None and calibration.host != 1.0:
            from memplan.errors import UsageError

            msg = f"--host: {times['calibration']} says how fast the host is: leave one of them out"
            raise UsageError(msg)
    return Site(
        host=HostSpeed.USUAL if host is None else host,
        between_nodes=times["network"],
        oversubscription=times.get("oversubscription", 1.0),
        in_network_reduction=times.get("in_network_reduction", False),
        loaded_per_s=times.get("loader"),
        calibration=calibration,
    )


def _prices(text: str | None) -> "Mapping[str, float] | float | None":
    if text is None:
        return None
    from memplan.sources.cards.prices import read_prices

    return read_prices(text)


def _evaluations(times: Values) -> "Evaluations | None":
    """How often the run is evaluated. Raises ``UsageError`` where half of it is said."""
    every, examples = times.get("eval_every"), times.get("eval_examples")
    if every is None and examples is None:
        return None
    if every is None or examples is None:
        from memplan.errors import UsageError

        given, missing = (
            ("eval-examples", "eval-every") if every is None else ("eval-every", "eval-examples")
        )
        msg = f"--{given}: says nothing without --{missing}"
        raise UsageError(msg)
    from memplan.estimator.time.evaluating import Evaluations

    return Evaluations(every_steps=every, examples=examples)


def with_measured_step(
    answers: "Sequence[Estimate]", values: Values, question: "TimeQuestion | None"
) -> "TimeQuestion | None":
    """The question on machines of which a step was measured; unchanged where none was.

    Raises ``UsageError`` where it is not of one setup on one card.
    """
    from memplan.errors import UsageError

    measured_s = values.get("measured_step")
    if measured_s is None:
        if values.get("save_calibration") is not None:
            msg = "--save-calibration: says nothing without a step that was measured: add --measured-step"
            raise UsageError(msg)
        return question
    if len(answers) != 1 or answers[0].gpu is None:
        msg = "--measured-step: is of one setup on one card: name --gpu, and --engine with --zero where several are compared"
        raise UsageError(msg)
    from memplan.estimator.job import Job
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.estimator.time.step_time import calibrated
    from memplan.fast_dataclass import replace

    answer, asked = answers[0], question or TimeQuestion()
    if asked.site.calibration is not None:
        msg = "--measured-step: makes a calibration of its own: leave --calibration out"
        raise UsageError(msg)
    job = Job.of_answer(answer.model, answer.setup, answer.gpu)
    found = calibrated(job, measured_s, site=asked.site)
    return replace(asked, site=replace(asked.site, calibration=found))


def time_question(
    times: Values, *, without_length: "Collection[str]" = ()
) -> "TimeQuestion | None":
    """What is asked of time; None: nothing is. ``without_length``: what means something without a run's length.

    Raises ``UsageError`` for what means nothing by itself, and ``ConfigError`` for a file of prices that
    cannot be read.
    """
    given = [
        each.parameter
        for each in TIME_OPTIONS
        if times.get(each.parameter, each.default) != each.default
    ]
    if not given:
        return None
    from memplan.estimator.time.run_cost import TimeQuestion

    _check_length(times, [name for name in given if name not in without_length])
    return TimeQuestion(
        tokens=times["tokens"],
        examples=times["examples"],
        epochs=times["epochs"],
        prices=_prices(times["price"]),
        mfu=times["mfu"],
        save_every_s=times.get("save_every"),
        evaluations=_evaluations(times),
        failures_per_gpu_day=times.get("failures_per_gpu_day"),
        site=_site(times),
    )


def _check_length(times: Values, given: list[str]) -> None:
    """Refuse what is said of a run, where its length is not, and a length that is none."""
    from memplan.errors import UsageError

    has_length = any(times[name] is not None for name in _OF_A_RUN)
    for name in ("price", "epochs", "save_every", "failures_per_gpu_day", "eval_every"):
        if name in given and not has_length:
            msg = f"--{name.replace('_', '-')}: says nothing without the length of a run: add --tokens or --examples"
            raise UsageError(msg)
    if times["epochs"] <= 0:
        msg = f"--epochs: must be above 0, got {times['epochs']:g}"
        raise UsageError(msg)
