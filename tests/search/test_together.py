"""Work done in copies of this process: the same results, errors raised here, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import memplan
from memplan.report.rows.written import rows_json
from memplan.search.comparison import comparison_setups
from memplan.search.in_parallel import together
from memplan.search.in_parallel.side_by_side import SideBySide
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    # pytest-xdist has threads of its own, of which Python 3.12 warns; a command line has none.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.fixture(params=[1, 2, 4])
def _cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "num_cores", request.param)
    monkeypatch.setattr(together, "ALONE_S", 0)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Of this process, those that nobody has waited for included."""
    found = set()
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in parentheses, may hold spaces; behind it stand the state and the parent.
            if int(each.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(each.parent.name))
    return found


@pytest.mark.usefixtures("_cores")
class TestAllOf:
    def test_results_stand_in_the_order_of_the_pieces(self) -> None:
        assert together.all_of(lambda number: [number] * 50_000, 7) == [
            [n] * 50_000 for n in range(7)
        ]

    def test_every_copy_does_some(self, tmp_path: Path) -> None:
        """Whoever has a piece waits until every other has one, however busy the machine is."""
        end = time.monotonic() + 30

        def work(_: int) -> int:
            (tmp_path / str(os.getpid())).touch()
            while len(list(tmp_path.iterdir())) < together.num_cores and time.monotonic() < end:
                time.sleep(0.005)
            return os.getpid()

        found = set(together.all_of(work, 8))
        assert len(found) == together.num_cores
        assert (os.getpid() in found) is True

    def test_shared_objects_are_the_same_ones(self) -> None:
        shared = [object(), ["a list"]]
        found = together.all_of(lambda number: (number, shared[number % 2]), 6, shared=shared)
        assert all(each is shared[number % 2] for number, each in found)

    def test_an_error_is_raised_here(self) -> None:
        def work(number: int) -> int:
            time.sleep(0.02)
            if number == 5:
                msg = "the fifth"
                raise ValueError(msg)
            return number

        with pytest.raises(ValueError, match="the fifth"):
            together.all_of(work, 6)

    def test_what_a_copy_that_dies_had_taken_is_done_here(self) -> None:
        here = os.getpid()

        def work(number: int) -> int:
            time.sleep(0.02)
            if os.getpid() != here:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        assert together.all_of(work, 6) == list(range(6))

    def test_no_process_and_no_pipe_is_left(self) -> None:
        """Other tests may have left some: pools of processes keep one that tracks what they share."""
        if not Path("/proc/self/fd").exists():
            pytest.skip("needs /proc")
        before = num_descriptors(), children()
        together.all_of(lambda number: number, 5)
        assert (num_descriptors(), children()) == before


def test_short_work_is_done_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "num_cores", 4)
    assert set(together.all_of(lambda _: os.getpid(), 8)) == {os.getpid()}


def test_what_is_left_after_a_while_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "num_cores", 2)
    monkeypatch.setattr(together, "ALONE_S", 0.02)

    def work(number: int) -> tuple[int, int]:
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
        return number, os.getpid()

    found = together.all_of(work, 6)
    assert [number for number, _ in found] == list(range(6))
    assert found[0][1] == os.getpid()
    assert len({process for _, process in found}) == 2


def test_answers_are_the_same_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("t5-3b")
    setups = comparison_setups(memplan.TrainingSetup(num_gpus=8))
    gpus = [load_gpu(name) for name in ("v100-32gb", "a100-80gb")]
    found = []
    monkeypatch.setattr(together, "ALONE_S", 0)
    for cores in (1, 3):
        monkeypatch.setattr(together, "num_cores", cores)
        rows = SideBySide(model=model, setups=setups, gpus=gpus).rows()
        flat = [each.to_dict() for row in rows for each in row]
        found.append(rows_json(flat, schema_version=1, assumptions=[]))
        assert all(each.model is model for row in rows for each in row)
    assert found[0] == found[1]


def test_the_command_says_the_same_alone(checkout: Path) -> None:
    """A child writes nothing of its own, and no handler of the first process runs twice."""
    command = [sys.executable, "-m", "memplan", "estimate", "gpt2-xl", "--gpus", "4"]
    plain = "import sys; from memplan.cli.app import run; sys.exit(run(sys.argv[1:]))"
    alone = [sys.executable, "-c", plain, *command[3:]]
    both = [
        subprocess.run(each, cwd=checkout, capture_output=True, check=True, text=True)
        for each in (command, alone)
    ]
    assert both[0].stdout == both[1].stdout
    assert both[0].stderr == both[1].stderr == ""
