"""Options that ask for the time of a step, and of a whole run, of every command that judges setups."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli.option_table import Values

if TYPE_CHECKING:
    from memplan.estimator.run_cost import TimeQuestion

TIME_PANEL = "Time and cost"
NO_TIMES: Values = {}
"""Of a command that is called from Python."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MAX_AMOUNT = 10**18
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gt]?)(bit|bps|b|b/s|bit/s)?", re.IGNORECASE)


def read_amount(text: str | int) -> int:
    """Read how many tokens or examples a run has: decimal, as people say it.

    >>> read_amount("1T"), read_amount("15.6B"), read_amount("52002"), read_amount("3e11")
    (1000000000000, 15600000000, 52002, 300000000000)
    """
    from memplan.cli.options import read_number

    plain = str(text).strip().replace("_", "").replace(",", "")
    match = _AMOUNT.fullmatch(plain)
    if match is None:
        return read_number(plain)
    amount = round(float(match[1]) * _DECIMAL[match[2].lower()])
    if not 1 <= amount <= _MAX_AMOUNT:
        msg = f"{text!r} is not a number of tokens or examples, such as 300B or 1T"
        raise ValueError(msg)
    return amount


def read_share(text: str | float) -> float:
    """Read a share: 0.45, 45%, or 45.

    >>> read_share("0.45"), read_share("45%"), read_share("45")
    (0.45, 0.45, 0.45)
    """
    plain = str(text).strip()
    try:
        value = float(plain.removesuffix("%"))
    except ValueError:
        value = 0.0
    if plain.endswith("%") or value > 1:
        value /= 100
    if not 0 < value <= 1:
        msg = f"{text!r} is not a utilisation, such as 0.45 or 45%"
        raise ValueError(msg)
    return value


def read_rate(text: str | float) -> float:
    """Read a GPU's share of the network [bytes/s]: 400 or 400Gbit, a data sheet's way.

    >>> read_rate("400"), read_rate("400Gbit"), read_rate("0.8Tbps")
    (50000000000.0, 50000000000.0, 100000000000.0)
    """
    match = _RATE.fullmatch(str(text).strip())
    value = float(match[1]) if match else 0.0
    if match is None or not value:
        msg = f"{text!r} is not a rate, such as 400 or 400Gbit: Gbit/s for one GPU, one way"
        raise ValueError(msg)
    scale = {"": 10**9, "g": 10**9, "t": 10**12}[match[2].lower()]
    return value * scale / 8


def _option(name: str, help_text: str, metavar: str | None, parser: Any = None) -> Any:
    return typer.Option(
        name, metavar=metavar, help=help_text, rich_help_panel=TIME_PANEL, parser=parser,
        show_default=False,
    )  # fmt: skip


_OPTIONS: tuple[tuple[str, Any, object], ...] = (
    ("time", Annotated[bool, _option("--time", "Tell how long a step takes, tokens per second and "
     "utilisation.", None)], False),
    ("tokens", Annotated[int | None, _option("--tokens", "Tokens of the whole run, 300B or 1T: its "
     "days, GPU-hours and energy.", "N", read_amount)], None),
    ("examples", Annotated[int | None, _option("--examples", "Sequences of the whole run, in place "
     "of tokens.", "N", read_amount)], None),
    ("epochs", Annotated[float, _option("--epochs", "How often they are gone through.", "N")], 1.0),
    ("price", Annotated[str | None, _option("--price", "Of one GPU's hour, 2.50, or a YAML file of "
     "prices by GPU: what the run costs.", "PRICE")], None),
    ("mfu", Annotated[float | None, _option("--mfu", "Utilisation that is known from elsewhere, 0.45: "
     "used in place of the model.", "SHARE", read_share)], None),
    ("network", Annotated[float | None, _option("--network", "What one GPU sends to other nodes, in "
     "Gbit/s one way. [default: 400 on H100 and later, 200 on A100]", "GBIT", read_rate)], None),
)  # fmt: skip
TIME_PARAMETERS = frozenset(name for name, _, _ in _OPTIONS)
_OF_A_RUN = ("tokens", "examples")


def takes_times(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of time, handed over in its parameter ``times``."""
    found: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "times":
            found.append(parameter)
            continue
        found += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, annotation, default in _OPTIONS
        ]

    @wraps(command)
    def taking(**values: Any) -> None:
        times = {name: values.pop(name) for name, _, _ in _OPTIONS}
        command(**values, times=times)

    taking.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in found]
    )
    return taking


def time_question(times: Values) -> "TimeQuestion | None":
    """What is asked of time; None: nothing is.

    Raises ``UsageError`` for what means nothing by itself, and ``ConfigError`` for a file of prices that
    cannot be read.
    """
    given = [name for name, _, default in _OPTIONS if times.get(name, default) != default]
    if not given:
        return None
    from memplan.errors import UsageError
    from memplan.estimator.run_cost import TimeQuestion

    has_length = any(times[name] is not None for name in _OF_A_RUN)
    for name in ("price", "epochs"):
        if name in given and not has_length:
            msg = f"--{name}: says nothing without the length of a run: add --tokens or --examples"
            raise UsageError(msg)
    if times["epochs"] <= 0:
        msg = f"--epochs: must be above 0, got {times['epochs']:g}"
        raise UsageError(msg)
    prices = None
    if times["price"] is not None:
        from memplan.sources.prices import read_prices

        prices = read_prices(times["price"])
    return TimeQuestion(
        tokens=times["tokens"],
        examples=times["examples"],
        epochs=times["epochs"],
        prices=prices,
        mfu=times["mfu"],
        between_nodes=times["network"],
    )
