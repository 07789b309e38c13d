"""The two setups that ``memplan compare`` sets side by side, out of what was typed."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass, replace
from memplan.options.panels import FILES_PANEL
from memplan.options.questions import ESTIMATE
from memplan.options.rows.shared import ALLOW, FILES, LAUNCH_FILES, MODEL

if TYPE_CHECKING:
    from memplan.estimator import Estimate

DEFAULT_GPU = "a100-80gb"
AS_GIVEN = "as given"
ASKED = tuple(
    option
    for option in ESTIMATE
    if option is not ALLOW and (option.panel != FILES_PANEL or option in LAUNCH_FILES)
)
"""What both of a pair share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Typed:
    """One setup as it was typed."""

    label: str
    name: str
    """Before its verdict, where there is less room."""
    values: Mapping[str, Any]
    """The command's parameters."""
    given: frozenset[str]
    """Those that were typed."""
    model: str | None = None
    setup_file: str | None = None
    preset: str | None = None


def is_a_pair(words: Sequence[str], values: Mapping[str, Any]) -> bool:
    """Whether two setups are named."""
    files = [*(values["setup"] or ()), *(values["preset"] or ())]
    return values["vs"] is not None or len(words) + len(files) > 1


def typed_sides(ctx: Any, words: Sequence[str]) -> tuple[Typed, Typed]:
    """The two, by what tells them apart: options, files, presets or models.

    Raises ``UsageError`` where there are more or fewer than two.
    """
    from memplan.cli.words.asked import asked_of

    asked = asked_of(ctx)
    values, given = asked.values, asked.given
    setups, presets = _split(values["setup"]), _split(values["preset"])
    one = Typed(label=AS_GIVEN, name=AS_GIVEN, values=values, given=given)
    if values["vs"] is not None:
        _at_most_one("--vs", setups, presets, list(words))
        first = replace(one, model=_first(words), setup_file=_first(setups), preset=_first(presets))
        return first, _changed(ctx, first, values["vs"])
    if setups:
        models, files = _apart(words, setups, of=lambda word: word.endswith((".yaml", ".yml")))
        _two("--setup", files)
        sides = [
            replace(one, label=_short(each), name=_short(each), setup_file=each) for each in files
        ]
    elif presets:
        from memplan.sources.stacks.presets import preset_names

        known = preset_names()
        models, names = _apart(words, presets, of=lambda word: word in known)
        _two("--preset", names)
        sides = [replace(one, label=each, name=each, preset=each) for each in names]
    else:
        _two("compare", words)
        return tuple(
            replace(one, label=_short(each), name=_short(each), model=each) for each in words
        )  # type: ignore[return-value]
    if len(models) > 1:
        msg = f"compare takes one MODEL beside two files or presets, not {' and '.join(models)}"
        raise UsageError(msg)
    first, second = (replace(each, model=models[0] if models else None) for each in sides)
    return first, second


def _split(texts: Sequence[str] | None) -> list[str]:
    return [part.strip() for text in texts or () for part in text.split(",") if part.strip()]


def _apart(
    words: Sequence[str], named: Sequence[str], *, of: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Models, and what an option named, of which the second may stand behind it as a word."""
    if len(named) > 1:
        return list(words), list(named)
    others = [word for word in words if of(word)][-1:]
    return [word for word in words if word not in others], [*named, *others]


def _two(what: str, names: Sequence[str]) -> None:
    if len(names) != 2:
        told = f"{len(names)} ({', '.join(names)})" if names else "none"
        msg = (
            f"{what}: two are compared, and there are {told}: name two, or say what differs with "
            '--vs "--zero 3"'
        )
        raise UsageError(msg)


def _at_most_one(option: str, *lists: list[str]) -> None:
    for names in lists:
        if len(names) > 1:
            msg = f"{option} says what differs, so there is one of {' and '.join(names)}: name one"
            raise UsageError(msg)


def _first(texts: Sequence[str]) -> str | None:
    return texts[0] if texts else None


def _short(text: str) -> str:
    """The last part of a path or an id."""
    return text.rstrip("/").rpartition("/")[2] or text


def _changed(ctx: Any, first: Typed, text: str) -> Typed:
    """The same with other options.

    Raises ``UsageError`` for options that describe no setup, and where there are none.
    """
    from memplan.cli.words.asked import asked_of
    from memplan.cli.words.unused import given_options, refuse

    try:
        words = shlex.split(text)
    except ValueError as error:
        msg = f"--vs: {text!r} cannot be split into words: {error}"
        raise UsageError(msg) from None
    other = ctx.command.make_context(ctx.info_name, words, parent=ctx.parent)
    changed = given_options(other)
    refuse("--vs", [typed for name, typed in changed.items() if name not in vs_takes()])
    if not changed:
        msg = '--vs: names no option to change, as in --vs "--zero 3"'
        raise UsageError(msg)
    others = asked_of(other).values
    values = dict(first.values) | {name: others[name] for name in changed}
    given = first.given | changed.keys()
    for name in replaced_by(changed.keys()) - changed.keys():
        values[name] = None
        given -= {name}
    if "gpu" in changed or "gpu_memory" in changed:
        for name in {"gpu", "gpu_memory"} - changed.keys():
            values[name] = None
    return replace(first, label=text, name="--vs", values=values, given=given)


def replaced_by(changed: Collection[str]) -> frozenset[str]:
    """What an engine brings along, unless it is named with it: its stage, its precision; an engine's file says all of it.

    >>> sorted(replaced_by(["zero"]))
    ['engine', 'precision', 'zero']
    """
    if any(option.parameter in changed for option in LAUNCH_FILES):
        places = ("offload", "offload_param", "fsdp_strategy")
        return frozenset(("engine", "zero", "precision", *places))
    if "engine" in changed or "zero" in changed:
        return frozenset(("engine", "zero", "precision"))
    return frozenset()


def vs_takes() -> frozenset[str]:
    """Parameters that the other setup may differ in; the model is the same."""
    return frozenset(option.parameter for option in ASKED if option not in MODEL)


def answer_of(typed: Typed) -> "Estimate":
    """Estimate one of the two.

    Raises ``UsageError`` for a setup without a model, and for more than one GPU.
    """
    from memplan.cli.output.terminal import remark
    from memplan.options.asked import Asked
    from memplan.options.estimating import answers

    values = {
        **dict.fromkeys(each.parameter for each in FILES),
        **typed.values, "setup": typed.setup_file, "preset": typed.preset,
    }  # fmt: skip
    if values["gpu"] is None and values["gpu_memory"] is None:
        values["gpu"] = [DEFAULT_GPU]
    asked = Asked(values=values, given=typed.given)
    spec = None if typed.model is None else asked.model(typed.model)
    if spec is None and typed.setup_file is None:
        msg = f"name a MODEL: {typed.label} names none (memplan models lists the built-in ones)"
        raise UsageError(msg)
    found = answers(asked, spec, remark=remark)
    if len(found) != 1:
        msg = '--gpu: compare takes one, and another with --vs "--gpu h100"'
        raise UsageError(msg)
    (answer,) = found
    if typed.preset is None:
        return answer
    told = tuple(note for note in answer.notes if not note.startswith("preset "))
    return replace(answer, notes=told)  # its name says it
