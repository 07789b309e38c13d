"""Five hundred hostile inputs at the surfaces where jobs are born: one line each, nothing lost, nothing executed."""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from memplan.cli.agent_tools import call
from memplan.errors import MemplanError
from memplan.sources import plugins
from memplan.sources.cards.organisation import defaults
from memplan.sources.machine.asking import CardsUnreadableError
from memplan.sources.machine.nvidia_smi import cards_from_xml
from memplan.sources.pools import read_pools
from tests.conftest import Outcome

Run = Callable[..., Outcome]
ROOT = Path(__file__).parents[2]
PLATFORM = str(ROOT / "configs" / "pools" / "platform.yaml")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, -0.5, 1e308, float("inf"), float("nan"), "", " ", "x" * 5000, "\x00", "\u202e8", "../../etc/passwd",
    "/dev/zero", "~/x", "$(touch stolen)", "`touch stolen`", "'; touch stolen; '", "!!python/object/apply:os.system ['touch stolen']",
    [], {}, [[]], {"a": {"b": []}}, ["gpt2", "gpt2"], {"gpu": "h100"}, "8 ", "1e3", "0x10", "NaN", "-8", "١٢", "h100,t4", "local:99",
)  # fmt: skip
"""Values that a key may be given."""


def one_line(outcome: Outcome, *, codes: tuple[int, ...] = (0, 2, 3, 4, 5)) -> None:
    assert outcome.exit_code in codes, outcome
    errors = [each for each in outcome.stderr.splitlines() if each.startswith("memplan: error: ")]
    assert len(errors) == (outcome.exit_code != 0)
    assert "Traceback" not in outcome.stderr
    assert len(outcome.stderr) < 3000


def safe_text(values: object) -> str:
    """YAML of whatever it is."""
    return yaml.safe_dump(values, allow_unicode=True)


POOL = {"name": "a", "gpu": "t4", "count": 8}
POOL_KEYS = (
    "name",
    "gpu",
    "count",
    "quota",
    "gpus_per_node",
    "price",
    "cpu_memory",
    "scheduler",
    "queue",
)


@pytest.mark.parametrize("key", POOL_KEYS)
def test_pools(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key with each odd value: read as it is meant, or refused with its file and place."""
    monkeypatch.chdir(tmp_path)
    for value in ODD:
        file = tmp_path / "pools.yaml"
        file.write_text(safe_text({"pools": [{**POOL, key: value}]}), encoding="utf-8")
        try:
            (pool,) = read_pools(file)
        except MemplanError as error:
            assert "pools.yaml" in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
        else:
            assert pool.usable_gpus >= 1
            assert pool.price is None or 0 <= pool.price < 1e9
            assert all(each.isalnum() or each in "-_." for each in pool.queue)
    assert not (tmp_path / "stolen").exists()


REQUEST = {"model": "gpt2", "gpus": 1, "seq_len": 64}
REQUEST_KEYS = ("model", "gpus", "pool", "engine", "setup", "adapter", "calibration")


@pytest.mark.parametrize("key", REQUEST_KEYS)
def test_requests(key: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    for value in ODD:
        file.write_text(safe_text({**REQUEST, key: value}), encoding="utf-8")
        outcome = run("admit", str(file), "--pools", PLATFORM, "--format", "json")
        one_line(outcome)
        if outcome.exit_code in (0, 5):
            json.loads(outcome.stdout)
        else:
            assert outcome.stdout == ""
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "- a", "model", "{", "model: [", "\t", "a: &a [*a]", "a: &a {b: *a}", "model: gpt2\nmodel: gpt2", "? [a]\n: b",
        "1: 2", "on: off", "model: !!python/name:os.system", "model: gpt2\n...\n---\nmodel: gpt2", "%YAML 9.9\n---\na: b",
        "model: gpt2\n" + "a: " * 200, "{" * 5000, "model: " + "x" * 2_000_000, "\ufeffmodel: gpt2\nseq_len: 64", "model: gpt2\x00",
    ],
)  # fmt: skip
def test_requests_that_are_no_mapping(text: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text(text, encoding="utf-8")
    one_line(run("admit", str(file), "--pools", PLATFORM))


# -- the webhook ----------------------------------------------------------------------------------------------


@pytest.fixture
def webhook(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The example, whose ``memplan`` answers in this process."""
    found = importlib.util.spec_from_file_location(
        "webhook", ROOT / "configs" / "admission" / "webhook.py"
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def answered(command: list[str], *, input: str, **_: Any) -> Any:
        file = tmp_path / "request.yaml"
        file.write_text(input, encoding="utf-8", errors="replace")
        outcome = run("admit", str(file), *command[3:])
        return SimpleNamespace(
            returncode=outcome.exit_code, stdout=outcome.stdout, stderr=outcome.stderr
        )

    monkeypatch.setattr(module.subprocess, "run", answered)
    return module


OBJECTS: tuple[Any, ...] = (
    {"kind": "ConfigMap"}, {"kind": "Pod", "metadata": {}}, {"metadata": {"annotations": None}}, {"metadata": None}, {}, None,
    {"kind": "Job", "spec": {"parallelism": 3}}, {"kind": "PyTorchJob", "metadata": {"annotations": {"other": "model: gpt2"}}},
)  # fmt: skip


def test_other_kinds_are_let_through(webhook: Any) -> None:
    for each in OBJECTS:
        body = json.dumps({"request": {"uid": "u", "object": each}}).encode()
        response = webhook.review(body, PLATFORM)["response"]
        assert (response["uid"], response["allowed"]) == ("u", True)


def test_hostile_annotations_are_refused_in_a_line(webhook: Any, tmp_path: Path) -> None:
    for value in ODD:
        text = value if isinstance(value, str) else safe_text(value)
        job = {"metadata": {"annotations": {"memplan/request": text}}}
        response = webhook.review(
            json.dumps({"request": {"uid": "u", "object": job}}).encode(), PLATFORM
        )["response"]
        assert response["allowed"] is False
        assert "\n" not in response["status"]["message"]
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"3", b'{"request": []}', b'{"request": {}}', b"\xff\xfe", b"{" * 9000],
)
def test_what_is_no_review_is_an_error_that_the_server_answers(webhook: Any, body: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, RecursionError)):
        webhook.review(body, PLATFORM)


# -- plug-ins --------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


THROWN = (
    ImportError("no\nmodule"),
    ValueError("x" * 9000),
    KeyError("k"),
    RecursionError(),
    SystemExit(3),
    MemoryError(),
    OSError(5, "io"),
    AssertionError(),
)


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_plug_ins_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises, and what is something else than its kind, is told in a line and is not there."""
    loads: list[Callable[[], object]] = [raising(each) for each in THROWN]
    loads += [(lambda value=value: value) for value in (*ODD[:20], object(), print, lambda: 1 / 0)]  # type: ignore[misc]
    for number, load in enumerate(loads):
        entry = SimpleNamespace(
            name=f"p{number}", module="mine", load=load, dist=SimpleNamespace(name="d", version="1")
        )
        monkeypatch.setattr(plugins, "_entries", lambda _, entry=entry: {entry.name: entry})
        monkeypatch.setattr(
            plugins, "import_module", lambda _: SimpleNamespace(MEMPLAN_INTERFACE=1)
        )
        plugins._loaded.cache_clear()
        found = plugins._loaded(kind, entry.name)
        if found.trouble:
            assert "\n" not in found.trouble
            assert len(found.trouble) <= plugins.MAX_WORDS + 10
        else:
            assert kind == "writers"
            assert callable(found.value)
    plugins._loaded.cache_clear()


# -- the rest ---------------------------------------------------------------------------------------------------


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("MEMPLAN_CONFIG", str(tmp_path))
    for value in ODD:
        (tmp_path / "defaults.yaml").write_text(safe_text({"gpu": value}), encoding="utf-8")
        one_line(run("estimate", "gpt2", "--seq-len", "64", "--format", "csv"))
    (tmp_path / "defaults.yaml").unlink()
    (tmp_path / "defaults.yaml").mkdir()
    assert defaults() == {}


@pytest.mark.parametrize(
    "shard",
    [
        "",
        "1",
        "0/0",
        "0/3",
        "4/3",
        "-1/3",
        "1/-3",
        "1/0",
        "a/b",
        "1/3/5",
        "1.0/3",
        "1 /3",
        "9" * 30 + "/3",
        "1/" + "9" * 30,
        "\u0661/3",
    ],
)
def test_shards(shard: str, run: Run) -> None:
    outcome = run("sweep", "gpt2", "--seq-len", "64", "--gpu", "t4", "--shard", shard)
    one_line(outcome, codes=(2, 3))


def test_half_written_rows(run: Run, tmp_path: Path) -> None:
    """Whatever a file's end was turned into, nothing before it is lost: it is whole again, or refused and left as it is."""
    grid = ("sweep", "gpt2", "--batch-size", "1-6", "--seq-len", "64", "--gpu", "t4", "--output")
    whole_file = tmp_path / "whole.jsonl"
    run(*grid, str(whole_file))
    whole = whole_file.read_bytes()
    chance = random.Random(33)
    for number in range(40):
        end = chance.randrange(len(whole))
        junk = chance.choice(
            [
                b"",
                b"{",
                b'{"combination": ',
                b"\x00" * 9,
                b"\xff\n",
                b"null\n",
                b"[]\n",
                b'{"combination": "2"}\n',
                b"\n\n",
            ]
        )
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(whole[:end] + junk)
        outcome = run(*grid, str(file), "--resume")
        one_line(outcome)
        assert file.read_bytes() == (whole if outcome.exit_code == 0 else whole[:end] + junk)


XML = (
    "<nvidia_smi_log><driver_version>{driver}</driver_version><gpu><product_name>{name}</product_name><uuid>{uuid}</uuid>"
    "<fb_memory_usage><total>{total}</total><used>{used}</used></fb_memory_usage></gpu></nvidia_smi_log>"
)


def test_cards_that_answer_oddly() -> None:
    """``nvidia-smi`` that says something else; odd answers of NVML are those of tests/sources/machine/test_cards.py."""
    usual = {
        "driver": "580",
        "name": "NVIDIA T4",
        "uuid": "GPU-1",
        "total": "15360 MiB",
        "used": "3 MiB",
    }
    assert len(cards_from_xml(XML.format(**usual))) == 1
    texts = [XML.format(**{**usual, key: value}) for key in usual for value in map(str, ODD)]
    texts += [
        "",
        "<",
        "<a/>",
        "<gpu/>",
        "\x00",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>",
        "<html><gpu></gpu></html>",
        "<a>" * 2000,
    ]
    for text in texts:
        try:
            found = cards_from_xml(text)
        except CardsUnreadableError as error:
            assert "\n" not in str(error)
        else:
            assert all(each.total_bytes > 0 and each.used_bytes >= 0 for each in found)


def test_agents(tmp_path: Path) -> None:
    for value in (*ODD, "x" * 10_000_000):
        for key in ("model", "setup"):
            answer = call("estimate", {"model": "gpt2", "seq_len": 64, key: value}, tmp_path)
            assert len(answer.text) < 25_000
            assert "Traceback" not in answer.text
            assert "a bug:" not in answer.text, (key, str(value)[:50], answer.text)
    assert not (tmp_path / "stolen").exists()
