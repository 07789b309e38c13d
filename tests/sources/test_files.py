"""Files as people have them: what is read, and what every wrong one says."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import ConfigError
from memplan.sources import files
from memplan.sources.files import read_json_mapping, read_mapping


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        pytest.param("a.json", '{"n": 1, "x": [null, true]}', {"n": 1, "x": [None, True]}, id="json"),
        pytest.param("a.json", '\ufeff{"n": 1}', {"n": 1}, id="byte-order-mark"),
        pytest.param("no-suffix", '{"n": 1}', {"n": 1}, id="json-without-suffix"),
        pytest.param("a.json", '{"x": [0.0, Infinity]}', {"x": [0.0, float("inf")]}, id="mamba-2"),
        pytest.param("a.yaml", "n: 1\nx: {y: [2]}\n", {"n": 1, "x": {"y": [2]}}, id="yaml"),
        pytest.param("a.YML", "n: 1", {"n": 1}, id="yml-in-capitals"),
        pytest.param("a.yaml", "e: 1e-5\nf: 2e6\ng: -1E+3", {"e": 1e-5, "f": 2e6, "g": -1e3},
                     id="exponent-without-a-dot"),
        pytest.param("a.yaml", "{}", {}, id="empty-mapping"),
    ],
)  # fmt: skip
def test_reads(tmp_path: Path, name: str, text: str, expected: dict[str, object]) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert read_mapping(path) == expected
    assert read_mapping(str(path)) == expected


REFUSED = [
    pytest.param("a.py", b"def a():\n    return 1\n", "is Python, which is not run", id="Python"),
    pytest.param("a.json", b"", "is not JSON: Expecting value at line 1, column 1", id="empty"),
    pytest.param("a.json", b'{\n "n": 1,,}', "at line 2, column 9", id="json-place"),
    pytest.param("a.json", b"[1, 2]", "must hold a JSON object, not a list", id="list"),
    pytest.param("a.json", b'"t5-3b"', "must hold a JSON object, not one text", id="text"),
    pytest.param("a.json", b"null", "must hold a JSON object, not nothing", id="null"),
    pytest.param("a.json", b'{"n": NaN}', "'n' is nan", id="nan"),
    pytest.param("a.json", b'{"n": -Infinity}', "'n' is -inf", id="infinity"),
    pytest.param("a.json", b'{"n": 1e999}', "'n' is inf", id="number-beyond-floats"),
    pytest.param("a.json", b'{"n": 1' + b"0" * 5000 + b"}", "thousands of digits", id="digits"),
    pytest.param("a.json", b"[" * 100_000, "nested more than 100 levels", id="json-deep"),
    pytest.param("a.json", b'{"a":' * 200 + b"1" + b"}" * 200, "nested more than 100", id="deep"),
    pytest.param("a.json", b"\x80\x04\x95", "is not text: byte 1 is not UTF-8", id="pickle"),
    pytest.param("a.json", '{"a": 1}'.encode("utf-16"), "is not UTF-8", id="utf-16"),
    pytest.param("a.yaml", b"", "must hold keys and values, not nothing", id="yaml-empty"),
    pytest.param("a.yaml", b"- a\n- b", "must hold keys and values, not a list", id="yaml-list"),
    pytest.param("a.yaml", b"just words", "not one text", id="yaml-text"),
    pytest.param("a.yaml", b"2024-01-01", "not a value", id="yaml-date"),
    pytest.param("a.yaml", b"a: 1\nb: [", "is not YAML: ", id="yaml-open"),
    pytest.param("a.yaml", b"a:\n\tb: 1", "at line 2, column 1", id="yaml-tab"),
    pytest.param("a.yaml", b"a: 1\nb: 2\na: 3", "key 'a' is given twice at line 3, column 1",
                 id="yaml-duplicate"),
    pytest.param("a.yaml", b"x: {a: 1, a: 2}", "key 'a' is given twice", id="nested-duplicate"),
    pytest.param("a.yaml", b"1: 2", "the key 1 is not text: put it in quotes", id="yaml-number-key"),
    pytest.param("a.yaml", b"a: .nan", "'a' is nan", id="yaml-nan"),
    pytest.param("a.yaml", b"a: 2024-99-99", "is not YAML: a value", id="yaml-impossible-date"),
    pytest.param("a.yaml", b"a: !!bool perhaps", "is not YAML: a value", id="yaml-impossible-bool"),
    pytest.param("a.yaml", b"a: !!timestamp now", "is not YAML: a value", id="yaml-impossible-time"),
    pytest.param("a.yaml", b"a: !!python/object:os.system {}", "is not YAML: could not determine",
                 id="yaml-python"),
    pytest.param("a.yaml", b"a: \x01", "is not YAML: ", id="yaml-control-character"),
    pytest.param("a.yaml", b"a: 1\n---\nb: 1", "is not YAML: ", id="yaml-two-documents"),
    pytest.param("a.yaml", b"a: &x [1, *x]", "alias *x in itself", id="yaml-alias-in-itself"),
    pytest.param(
        "a.yaml",
        b"a: &a [1, 1, 1, 1]\n" + b"".join(b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (98 + n, 98 + n, *[97 + n] * 4) for n in range(12)),
        "stands for more than 524288 values", id="yaml-aliases-of-billions",
    ),
    pytest.param(
        "a.yaml",
        b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (n + 1, n + 1, n) for n in range(150)),
        "nested more than 100", id="yaml-aliases-too-deep",
    ),
    pytest.param("a.yaml", b"a: *x", "alias *x", id="yaml-undefined-alias"),
    pytest.param("a.yaml", b"[" * 300_000, "nested more than 100 levels", id="yaml-deep"),
    pytest.param("a.yaml", b"- " * 300_000, "nested more than 100 levels", id="yaml-deep-blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), REFUSED)
def test_refuses_in_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_mapping(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_mapping(tmp_path / "absent.json")


def test_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        read_mapping(tmp_path)


def test_refuses_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "_read_at_most", refuse)  # root may read everything
    with pytest.raises(ConfigError, match="may not be read: check its permissions"):
        read_mapping(path)


@pytest.mark.parametrize(
    "path", [pytest.param("a\0.json", id="null-byte"), pytest.param("a" * 5000, id="too-long")]
)
def test_refuses_what_cannot_be_a_path(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mapping(path)


@pytest.mark.parametrize(("name", "limit"), [("a.json", "16 MiB"), ("a.yaml", "1 MiB")])
def test_refuses_a_huge_file_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: str
) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(100 * 2**20)

    def read(*_: object) -> bytes:
        pytest.fail("a huge file was read")

    monkeypatch.setattr(files, "_read_at_most", read)
    with pytest.raises(ConfigError, match=f"is larger than {limit}"):
        read_mapping(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero here")
def test_refuses_what_never_ends() -> None:
    with pytest.raises(ConfigError, match="is a pipe or a device, not a file"):
        read_mapping("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe or a device, not a file"):
        read_mapping(path)


def test_reads_no_more_than_the_limit_of_a_file_that_says_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    monkeypatch.setattr(files, "_read_at_most", lambda _, num_bytes: b" " * num_bytes)
    with pytest.raises(ConfigError, match="is larger than 16 MiB"):
        read_mapping(path)


def test_a_label_replaces_the_path(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"^config\.json of a/b: must hold"):
        read_json_mapping(path, label="config.json of a/b")


def test_reads_without_libyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    path = tmp_path / "a.yaml"
    path.write_text("a: 1e3\na: 2")
    with pytest.raises(ConfigError, match="given twice"):
        read_mapping(path)
    path.write_text("a: 1e3")
    assert read_mapping(path) == {"a": 1000.0}


def test_json_with_two_equal_keys_is_refused_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ('{"a": 1, "a": 1}', '{"b": [{"a": 1, "a": 2}]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="the key 'a' is given twice"):
            read_mapping(path)


YAML_SYMBOLS = "{}[]:,-!*&?|>'\"% \n\t0123.eE_~#@`=<yn"


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
@settings(max_examples=100, deadline=None)
@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.text(YAML_SYMBOLS, max_size=60).map(str.encode),
        st.text(max_size=60).map(lambda text: text.encode(errors="replace")),
        st.tuples(
            st.sampled_from(("int", "float", "bool", "null", "timestamp", "binary", "set", "omap")),
            st.text("0123:-.xe_ T{}[]", max_size=12),
        ).map(lambda parts: f"a: !!{parts[0]} {parts[1]}".encode()),
    )
)
def test_whatever_a_file_holds_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    refusal = ""
    value: dict[str, object] = {}
    try:
        value = read_mapping(path)
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert all(isinstance(key, str) for key in value)


def test_yaml_aliases_are_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {x: 1, y: [1]}\nother: *b\nmerged:\n  <<: *b\n  y: 3\n")
    found = read_mapping(path)
    assert (found["other"], found["merged"]) == ({"x": 1, "y": [1]}, {"x": 1, "y": 3})
