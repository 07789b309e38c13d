import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import UsageError
from memplan.search.ranges import MAX_VALUES, parse_range


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param("8", [8], id="one number"),
        pytest.param("1,2,4", [1, 2, 4], id="list"),
        pytest.param("4,1,2", [4, 1, 2], id="the order is kept"),
        pytest.param("0-3", [0, 1, 2, 3], id="every integer"),
        pytest.param("2-2", [2], id="range of one"),
        pytest.param("1..32", [1, 2, 4, 8, 16, 32], id="doubling"),
        pytest.param("3..20", [3, 6, 12], id="doubling stops before the end"),
        pytest.param("5..5", [5], id="doubling of one"),
        pytest.param("1,4..16,2-3", [1, 4, 8, 16, 2, 3], id="mixed"),
        pytest.param("1,1,1-2", [1, 2], id="each once"),
        pytest.param(" 1 , 2 .. 8 ", [1, 2, 4, 8], id="blanks"),
        pytest.param("1..1000000000000", [2**n for n in range(40)], id="long doubling"),
        pytest.param(f"1-{MAX_VALUES}", list(range(1, MAX_VALUES + 1)), id="longest"),
    ],
)
def test_ranges_are_expanded(text: str, values: list[int]) -> None:
    assert parse_range(text) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "write a list", id="nothing"),
        pytest.param("1,,2", "write a list", id="a hole"),
        pytest.param("1-", "write a list", id="open range"),
        pytest.param("..8", "write a list", id="open doubling"),
        pytest.param("-1", "write a list", id="negative"),
        pytest.param("1.5", "write a list", id="fraction"),
        pytest.param("one", "write a list", id="word"),
        pytest.param("²", "write a list", id="digit that is no number"),
        pytest.param("8-1", "write 1-8", id="backwards"),
        pytest.param("32..1", "write 1..32", id="doubling backwards"),
        pytest.param("0..8", "start at 1", id="doubling from 0"),
        pytest.param("1-1000000", "more than 1024", id="a million"),
        pytest.param("1-800,1001-1800", "more than 1024", id="too many in parts"),
        pytest.param("9" * 5000, "18 digits", id="absurd"),
    ],
)
def test_bad_ranges_are_refused_in_one_short_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_range(text, option="--micro-batch")
    assert str(caught.value).startswith("--micro-batch: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_numbers_below_the_minimum_are_refused() -> None:
    with pytest.raises(UsageError, match="holds 0, and 1 is the least"):
        parse_range("0-3", option="--gpus", minimum=1)


@given(st.text(alphabet="0123456789,-. x", max_size=30))
def test_any_text_gives_a_short_list_or_a_usage_error(text: str) -> None:
    try:
        values = parse_range(text)
    except UsageError:
        return
    assert 1 <= len(values) <= MAX_VALUES
    assert len(set(values)) == len(values)
    assert min(values) >= 0
