"""``memplan explain --operation``: what one operation keeps for backward."""

from typing import TYPE_CHECKING

from memplan.cli.output.terminal import say_rows
from memplan.cli.taking import Context
from memplan.options.rows.shared import OutputFormat

if TYPE_CHECKING:
    from memplan.dtypes import DType
    from memplan.report.lessons.teaching import Sizes


def show_lesson(ctx: Context) -> None:
    """Write what the operation that is named keeps, or every operator's rule."""
    from memplan.cli.words.unused import given_options, refuse
    from memplan.report.lessons.explain_operation import (
        lesson_rows,
        operator_rows,
        print_lesson,
        print_operators,
    )
    from memplan.report.lessons.lesson_names import find_lesson

    name, output_format = ctx.params["operation"], ctx.params["format"]
    sizes = _lesson_sizes(ctx)
    if name == EVERY_OPERATOR:
        if output_format is OutputFormat.TABLE:
            from memplan.report.terminal.console import TerminalConsole

            print_operators(TerminalConsole(), sizes)
            return
        from memplan.report.explained.explanation import EXPLAIN_SCHEMA_VERSION

        rows = operator_rows(sizes)
        say_rows(rows, output_format, (), schema_version=EXPLAIN_SCHEMA_VERSION)
        return
    lesson = find_lesson(name)
    if lesson.fixed_sizes and not sizes.of_shape:
        given = given_options(ctx)
        names = ("model", "batch_size", "seq_len", "dtype")
        idle = [text for key, text in given.items() if key in names]
        refuse(f"--operation {lesson.name}, which is about {lesson.fixed_sizes},", idle)
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_lesson(TerminalConsole(), lesson, sizes)
        return
    from memplan.report.explained.explanation import EXPLAIN_SCHEMA_VERSION

    rows = lesson_rows(lesson, sizes)
    say_rows(rows, output_format, (), schema_version=EXPLAIN_SCHEMA_VERSION)


EVERY_OPERATOR = "all"


def _read_shape(text: str) -> tuple[int, ...]:
    """``512x1024x1024``.

    Raises ``UsageError`` for anything else.
    """
    from memplan.errors import UsageError

    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        msg = f"--shape: {text!r} are no sizes of a tensor: write 512x1024x1024"
        raise UsageError(msg)
    return tuple(map(int, parts))


def _read_dtype(text: str) -> "DType":
    """A floating-point format, by its name here or torch's.

    Raises ``UsageError`` for any other.
    """
    from memplan.dtypes import DType
    from memplan.errors import UsageError, did_you_mean

    known = {each.label: each for each in DType if each.is_floating}
    known |= {"float32": DType.FP32, "float16": DType.FP16, "bfloat16": DType.BF16}
    name = text.lower().removeprefix("torch.")
    if name not in known:
        msg = (
            f"--dtype: {text!r} is not one of {', '.join(known)}.{did_you_mean(name, tuple(known))}"
        )
        raise UsageError(msg)
    return known[name]


def _lesson_sizes(ctx: Context) -> "Sizes":
    """The usual sizes, or those of the model or tensor named; as many tokens as are asked for."""
    from dataclasses import replace

    from memplan.cli.words.unused import given_options, refuse
    from memplan.options.largest import without_max
    from memplan.report.lessons.teaching import USUAL, Sizes
    from memplan.report.shape import formula_shape
    from memplan.sources.models import load_model

    asked = without_max(ctx.params)
    dtype = USUAL.dtype if asked["dtype"] is None else _read_dtype(asked["dtype"])
    if asked["shape"] is not None:
        given = given_options(ctx)
        idle = [text for key, text in given.items() if key in ("model", "batch_size", "seq_len")]
        refuse("--shape", idle)
        return Sizes.of(_read_shape(asked["shape"]), dtype)
    sizes = replace(
        USUAL, batch=asked["batch_size"] or 1, tokens=asked["seq_len"] or USUAL.tokens, dtype=dtype
    )
    if asked["model"] is None:
        return sizes
    names = ("family", "allow_guess", "allow_unknown_keys", "num_labels", "revision", "token")
    spec = load_model(asked["model"], asked["task"], **{name: asked[name] for name in names})
    shape = formula_shape(spec)
    return replace(
        sizes,
        hidden=shape.hidden_size,
        width=shape.intermediate_size or shape.expert_size,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab_size,
    )
