"""Sweeps over a cluster, in parts, and written so that a killed run goes on: no row lost, none twice."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.cli.cluster import dask_executor
from memplan.errors import InputError, UsageError
from memplan.sources.rows_file import NUMBER, RowsFile, read_written
from tests.conftest import Outcome

Run = Callable[..., Outcome]
ROOT = Path(__file__).parents[2]
GRID = (
    "sweep",
    "gpt2",
    "--batch-size",
    "1..16",
    "--gpus",
    "1,3",
    "--seq-len",
    "64,96",
    "--gpu",
    "h100,t4",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The rows of the whole grid."""
    file = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    subprocess.run(
        [sys.executable, "-m", "memplan", *GRID, "--output", str(file)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return file.read_bytes()


def test_rows_are_those_of_the_table_s_formats(run: Run, whole: bytes) -> None:
    lines = run(*GRID, "--format", "jsonl").stdout.splitlines()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [{key: row[key] for key in row if key != NUMBER} for row in rows] == list(
        map(json.loads, lines)
    )
    assert [row[NUMBER] for row in rows] == sorted(row[NUMBER] for row in rows)


@pytest.mark.parametrize("count", [1, 3, 50])
def test_parts_put_together_are_the_whole(
    run: Run, whole: bytes, tmp_path: Path, count: int
) -> None:
    found = b""
    for number in range(1, count + 1):
        file = tmp_path / f"{number}.jsonl"
        outcome = run(*GRID, "--output", str(file), "--shard", f"{number}/{count}")
        assert outcome.exit_code == 0, outcome.stderr
        found += file.read_bytes()
    assert found == whole


@pytest.mark.parametrize("share", [0.0, 0.01, 0.35, 0.5, 0.999, 1.0])
def test_it_goes_on_wherever_it_was_cut(
    run: Run, whole: bytes, tmp_path: Path, share: float
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(whole[: int(share * len(whole))])
    outcome = run(*GRID, "--output", str(file), "--resume")
    assert outcome.exit_code == 0, outcome.stderr
    assert file.read_bytes() == whole
    assert ("dropped" in outcome.stderr) is (0 < share < 1)


def test_in_python_a_part_is_rows_of_the_whole() -> None:
    import memplan

    asked: Any = {"batch_size": "1..16", "gpu": "t4", "seq_len": 64}
    rows = memplan.sweep("gpt2", **asked).rows()
    parts = [memplan.sweep("gpt2", **asked, shard=f"{number}/2").rows() for number in (1, 2)]
    assert parts[0] + parts[1] == rows


@pytest.mark.parametrize(
    ("held", "words", "said"),
    [
        ("{}\n", ("--resume",), "holds no rows of a sweep"),
        ("hello\n", ("--resume",), "holds no rows of a sweep"),
        ("\xff\x00\n", ("--resume",), "holds no rows of a sweep"),
        (f'{{"{NUMBER}": 1}}\n' * 2, ("--resume",), "is of another sweep, or another memplan"),
        (f'{{"{NUMBER}": 99999}}\n' * 2, ("--resume",), "is of another sweep"),
        (f'{{"{NUMBER}": -4}}\n' * 2, ("--resume",), "is of another sweep"),
        ("x", (), "is there already: add --resume"),
        (None, ("--shard", "0/3"), "'0/3' is no part"),
        (None, ("--shard", "4/3"), "'4/3' is no part"),
        (None, ("--format", "csv"), "--output makes no use of --format"),
        (None, ("--jobs", "2", "--dask", "tcp://x"), "--dask makes no use of --jobs"),
        (None, ("--dask", "tcp://127.0.0.1:9"), "no scheduler answers at tcp://127.0.0.1:9"),
        (None, ("--dask", "nothing at all"), "no scheduler answers"),
    ],
)  # fmt: skip
def test_what_cannot_be(
    run: Run,
    tmp_path: Path,
    held: str | None,
    words: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memplan.cli.cluster.PATIENCE_S", 0.5)
    file = tmp_path / "rows.jsonl"
    if held is not None:
        file.write_text(held, encoding="latin-1")
    outcome = run(*GRID, "--output", str(file), *words)
    assert outcome.exit_code in (2, 3), outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert said in outcome.stderr
    assert held is None or file.read_text(encoding="latin-1") == held, "nothing is lost"


def test_a_clusters_client_says_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of Dask's loggers have a level of their own."""
    distributed = pytest.importorskip("distributed")

    def refused(*_: object, **__: object) -> None:
        raise OSError

    own = logging.getLogger("distributed.client")
    monkeypatch.setattr(distributed, "Client", refused)
    own.setLevel(logging.WARNING)
    with pytest.raises(UsageError, match="no scheduler answers"), dask_executor("tcp://x"):
        pass
    assert not own.isEnabledFor(logging.ERROR)


def test_a_file_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    outcome = run(*GRID, "--output", str(tmp_path / "no" / "rows.jsonl"))
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (3, 1)
    assert run(*GRID, "--resume").exit_code == 2
    if Path("/dev/full").exists():
        outcome = run(*GRID, "--output", "/dev/full")
        assert (outcome.exit_code, outcome.stderr.count("\n")) == (3, 1)
    first = RowsFile(tmp_path / "rows.jsonl", size=0)
    outcome = run(*GRID, "--output", str(tmp_path / "rows.jsonl"))
    first.close()
    assert "another process writes to it" in outcome.stderr


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_torn_off_the_rest_is_whole_setups(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cards = data.draw(st.integers(1, 3))
    setups = data.draw(st.integers(0, 6))
    lines = [
        json.dumps({NUMBER: number, "card": card, "text": "x" * number})
        for number in range(setups)
        for card in range(cards)
    ]
    whole = "".join(f"{line}\n" for line in lines).encode()
    kept = whole[: data.draw(st.integers(0, len(whole)))]
    path = tmp_path_factory.mktemp("torn") / "rows.jsonl"
    path.write_bytes(kept)
    found = read_written(path, num_cards=cards)
    left = kept[: found.size].splitlines()
    assert found.size + found.dropped_bytes == len(kept)
    assert len(left) % cards == 0
    assert len(left) == kept.count(b"\n") // cards * cards
    assert found.number == (len(left) // cards - 1 if left else None)


def test_a_long_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.sources.rows_file.TAIL_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    file = RowsFile(path, size=0)
    for number in range(100):
        file.append([{"text": "y" * 70}] * 2, number)
    file.close()
    assert read_written(path, num_cards=2).number == 99
    path.write_bytes(path.read_bytes()[:-5])
    found = read_written(path, num_cards=2)
    assert found.number == 98
    path.write_text("no rows\n" * 100)
    with pytest.raises(InputError, match="holds no rows"):
        read_written(path, num_cards=2)


# -- a real cluster -----------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list["subprocess.Popen[bytes]"]]]:
    """A scheduler's address, and two workers."""
    pytest.importorskip("distributed")
    place = tmp_path / "scheduler.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def started(module: str, *words: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{module}", "--scheduler-file", str(place), "--no-dashboard", *words],
            env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    own = ("--host", "127.0.0.1")
    scheduler = started("dask_scheduler", *own, "--port", "0")
    wait_until(place.exists)
    workers = [started("dask_worker", *own, "--nthreads", "1", "--no-nanny") for _ in range(2)]
    yield json.loads(place.read_text())["address"], workers
    for process in (*workers, scheduler):
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def wait_until(is_so: Callable[[], bool], *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


LARGE = ("sweep", "llama-3.2-1b", "--batch-size", "1-4", "--gpus", "8", "--zero", "1-3", "--seq-len", "512,1024",
         "--checkpointing", "none,full", "--gpu", "h100,a100")  # fmt: skip


@pytest.mark.long
def test_a_worker_of_a_cluster_is_killed(
    cluster: tuple[str, list["subprocess.Popen[bytes]"]], tmp_path: Path
) -> None:
    """No row is lost, and none is there twice; then the run itself is killed, and goes on alone."""
    address, workers = cluster
    spread, alone = tmp_path / "spread.jsonl", tmp_path / "alone.jsonl"

    def begun(file: Path, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "memplan", *LARGE, "--output", str(file), *words],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    run = begun(spread, "--dask", address)
    wait_until(lambda: spread.exists() and spread.stat().st_size > 0)
    workers[0].send_signal(signal.SIGKILL)
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert said == f"memplan: {spread}: 96 rows of 48 setups\n"
    # The second run is killed twice.
    for _ in range(2):
        size = alone.stat().st_size if alone.exists() else 0
        run = begun(alone, "--resume")
        wait_until(lambda size=size: alone.exists() and alone.stat().st_size > size)  # type: ignore[misc]
        run.kill()
        run.communicate()
    run = begun(alone, "--resume")
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert alone.read_bytes() == spread.read_bytes()
    numbers = [json.loads(line)[NUMBER] for line in spread.read_text().splitlines()]
    assert numbers == sorted(numbers)
    assert len(numbers) == 2 * len(set(numbers)) == 96
