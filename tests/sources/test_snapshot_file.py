"""A pickle is a program: only the operations of plain containers are followed."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import InputError
from memplan.sources import snapshot_file
from memplan.sources.snapshot_file import parse_plain, read_snapshot

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each) | st.tuples(each, each),
)


class Command:
    """Runs a command where Python's own reader reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("owned",)


@given(plain, st.sampled_from((2, 3, 4, 5)))
def test_plain_containers_are_read_as_python_reads_them(value: object, protocol: int):
    assert parse_plain(pickle.dumps(value, protocol=protocol), source="a.pickle") == value


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes):
    try:
        parse_plain(b"\x80\x04" + data, source="a.pickle")
    except InputError as error:
        assert str(error).startswith("a.pickle: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(pickle.dumps({"a": Command()}), "asks for STACK_GLOBAL at byte", id="a call"),
        pytest.param(pickle.dumps(Command(), protocol=2), "asks for GLOBAL at byte 2", id="old"),
        pytest.param(b"cos\nsystem\n(S'true'\ntR.", "asks for GLOBAL at byte 0", id="protocol 0"),
        pytest.param(pickle.dumps({"a": b"x"}), "asks for SHORT_BINBYTES", id="bytes"),
        pytest.param(pickle.dumps({1, 2}), "asks for EMPTY_SET", id="a set"),
        pytest.param(pickle.dumps({1: 2}), "has a key that is not text", id="a number as key"),
        pytest.param(pickle.dumps({(1, (2,)): 2}), "key that is not text", id="a tuple as key"),
        pytest.param(b"\x80\x09N.", "of protocol 9", id="a protocol to come"),
        pytest.param(b"", "cannot be read on at byte 0", id="nothing"),
        pytest.param(pickle.dumps([1, "text"])[:-6], "is cut off", id="cut off"),
        pytest.param(b"\x80\x04\xff.", "unknown operation 255", id="no operation"),
        pytest.param(b"\x80\x04h\x07.", "cannot be read on", id="never put"),
        pytest.param(b"\x80\x04Na.", "cannot be read on", id="adds to nothing"),
        pytest.param(b"\x80\x04X\xff\xff\xff\xff.", "cannot be read on", id="text without end"),
        pytest.param(b"\x80\x04\x8d" + b"\xff" * 8 + b".", "cannot be read on", id="8 EiB of text"),
    ],
)
def test_anything_else_is_refused(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("run.pickle").write_bytes(data)
    with pytest.raises(InputError, match=message) as refused:
        read_snapshot("run.pickle")
    assert "\n" not in str(refused.value)
    assert not Path("owned").exists()


def test_a_memo_of_any_number_takes_no_room():
    assert parse_plain(b"\x80\x02]r\xff\xff\xff\xff.", source="a.pickle") == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"]" * 200_000 + b"a" * 199_999, id="lists"),
        pytest.param(b")" + b"\x85" * 200_000, id="tuples"),
        pytest.param(b"]q\x00h\x00a", id="a list in itself"),
        pytest.param(b"}q\x00X\x01\x00\x00\x00kh\x00s", id="a dict in itself"),
        pytest.param(b"]" + b"q\x00]h\x00ah\x00a" * 100, id="each twice in the next"),
    ],
)
def test_deep_nesting_is_refused_without_recursion(data: bytes):
    with pytest.raises(InputError, match="nested more than 50 levels deep"):
        parse_plain(b"\x80\x04" + data + b".", source="a.pickle")


def test_nesting_up_to_the_bound_is_read():
    depth = snapshot_file.MAX_DEPTH
    found = parse_plain(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".", source="a.pickle")
    for _ in range(depth - 1):
        assert isinstance(found, list)
        (found,) = found
    assert found == []


def test_operations_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot_file, "MAX_OPERATIONS", 10)
    assert parse_plain(b"\x80\x04]" + b"\x94" * 7 + b".", source="a.pickle") == []
    with pytest.raises(InputError, match="holds more than 10 operations"):
        parse_plain(b"\x80\x04]" + b"\x94" * 20 + b".", source="a.pickle")


def test_what_is_built_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot_file, "MAX_CONTAINERS", 3)
    assert parse_plain(b"\x80\x04]]]a.", source="a.pickle") == [[]]
    with pytest.raises(InputError, match="holds more than 3 containers"):
        parse_plain(b"\x80\x04]]]].", source="a.pickle")


def test_a_file_that_is_not_there_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="there is no such file"):
        read_snapshot(tmp_path / "none.pickle")
    monkeypatch.setattr(snapshot_file, "MAX_SNAPSHOT_BYTES", 1 << 20)
    large = tmp_path / "large.pickle"
    large.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(InputError, match="is larger than 1 MiB"):
        read_snapshot(large)
