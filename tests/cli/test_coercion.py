from enum import StrEnum
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from memplan.cli.with_typer.app import MemplanCommand
from memplan.options.numbers import read_number


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


def show(
    whole: Annotated[int, typer.Option(min=1, max=9)] = 1,
    real: Annotated[float | None, typer.Option()] = None,
    flag: Annotated[bool | None, typer.Option()] = None,
    colour: Annotated[Colour, typer.Option(case_sensitive=False)] = Colour.RED,
    words: Annotated[list[str] | None, typer.Option()] = None,
    numbers: Annotated[list[int] | None, typer.Option()] = None,
    count: Annotated[int | None, typer.Option(parser=read_number)] = None,
) -> None:
    typer.echo(repr((whole, real, flag, colour.value, words, numbers, count)))


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=MemplanCommand)(show)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output.strip()


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        pytest.param([], (1, None, None, "red", None, None, None), id="defaults"),
        pytest.param(["--whole", "9"], (9, None, None, "red", None, None, None), id="int"),
        pytest.param(["--real", "0.5"], (1, 0.5, None, "red", None, None, None), id="float"),
        pytest.param(["--no-flag"], (1, None, False, "red", None, None, None), id="flag"),
        pytest.param(["--colour", "Green"], (1, None, None, "green", None, None, None), id="enum"),
        pytest.param(
            ["--words", "a", "--words", "b"],
            (1, None, None, "red", ["a", "b"], None, None),
            id="list of text",
        ),
        pytest.param(
            ["--numbers", "2", "--numbers", "3"],
            (1, None, None, "red", None, [2, 3], None),
            id="list of numbers",
        ),
        pytest.param(
            ["--count", "2851e6"], (1, None, None, "red", None, None, 2851000000), id="parser"
        ),
    ],
)
def test_values_arrive_as_the_annotation_promises(
    arguments: list[str], values: tuple[object, ...]
) -> None:
    assert invoke(*arguments) == (0, repr(values))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--whole", "0"], id="too small"),
        pytest.param(["--whole", "10"], id="too large"),
        pytest.param(["--whole", "x"], id="not a number"),
        pytest.param(["--whole", "9" * 5000], id="endless number"),
        pytest.param(["--real", "x"], id="not a float"),
        pytest.param(["--colour", "blue"], id="unknown choice"),
        pytest.param(["--numbers", "2", "--numbers", "x"], id="one bad item"),
        pytest.param(["--count", "1e99"], id="parser refuses"),
    ],
)
def test_bad_values_are_usage_errors_that_name_the_option(arguments: list[str]) -> None:
    exit_code, output = invoke(*arguments)
    assert exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in output


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("512", 512),
        ("2851e6", 2_851_000_000),
        ("1.5e3", 1500),
        ("2_851_000_000", 2_851_000_000),
        ("7.00E9", 7_000_000_000),
    ],
)
def test_numbers_may_be_written_short(text: str, number: int) -> None:
    assert read_number(text) == number


@pytest.mark.parametrize("text", ["", "x", "1.5", "1.25e1", "-3", "1e-3", "1e18", "1e99", "9" * 19])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        read_number(text)
