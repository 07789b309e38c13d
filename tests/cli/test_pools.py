"""Plans for a platform's pools: which comes first, and the file that asks for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import memplan
from memplan.search.planning.goal import Goal, Objective
from memplan.search.planning.pools import pool_goal, pool_plans
from memplan.sources.pools import pools_from
from tests.conftest import Outcome

Run = Callable[..., Outcome]
FAST = {
    "name": "fast",
    "gpu": "h100",
    "count": 8,
    "price": 8.0,
    "scheduler": "slurm",
    "queue": "fast-q",
}
CHEAP = {"name": "cheap", "gpu": "a10g", "count": 4, "quota": 2, "price": 0.1, "scheduler": "kueue",
         "queue": "cheap-q"}  # fmt: skip
SMALL = {"name": "small", "gpu": "1GiB", "count": 64, "price": 0.01}
ONE = ("plan", "gpt2", "--gpus", "1", "--seq-len", "128", "--checkpointing", "none")


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def written(*pools: dict[str, Any]) -> str:
        path = tmp_path / "pools.yaml"
        path.write_text(yaml.safe_dump({"pools": list(pools)}))
        return str(path)

    return written


@pytest.mark.parametrize(
    ("words", "first"),
    [((), "cheap"), (("--objective", "speed"), "fast"), (("--objective", "batch"), "fast")],
)
def test_which_comes_first(
    run: Run, file: Callable[..., str], words: tuple[str, ...], first: str
) -> None:
    outcome = run(*ONE, "--pools", file(FAST, CHEAP, SMALL), *words)
    assert outcome.exit_code == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[0] == f"Pool {first}"
    assert any(line.startswith(" small ") and "nothing fits" in line for line in lines)
    said = "--objective cost: every pool has a price"
    assert (said in outcome.stderr) is (not words)


def test_the_file_is_of_the_pool_s_scheduler(
    run: Run, file: Callable[..., str], tmp_path: Path
) -> None:
    pools, written = file(FAST, CHEAP), tmp_path / "job"
    asked = (*ONE, "--pools", pools, "--tokens", "1M")
    outcome = run(*asked, "--output", str(written))
    assert outcome.exit_code == 0, outcome.stderr
    job = yaml.safe_load(written.read_text())
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "cheap-q"
    assert "for the pool cheap: 1 of its A10G" in outcome.stderr
    outcome = run(*asked, "--objective", "speed", "--output", str(written))
    assert "#SBATCH --partition=fast-q\n" in written.read_text()
    assert run(*asked, "--emit", "ray").stdout.startswith("# gpt2 on 1 A10G")
    lone = run(*ONE, "--pools", file(SMALL | {"gpu": "t4"}), "--output", str(written))
    assert lone.exit_code == 2
    assert "the pool names no scheduler" in lone.stderr


def test_rows_name_their_pool(run: Run, file: Callable[..., str]) -> None:
    pools = file(FAST, CHEAP, SMALL)
    rows = json.loads(run(*ONE, "--pools", pools, "--format", "json").stdout)["rows"]
    assert list(dict.fromkeys(row["pool"] for row in rows)) == ["cheap", "fast"]
    found = memplan.plan("gpt2", gpus=1, seq_len=128, checkpointing="none", pools=pools)
    assert found.pool is not None
    assert found.pool.name == "cheap"
    assert [row["micro_batch_size"] for row in found.rows()] == [
        row["micro_batch_size"] for row in rows if row["pool"] == "cheap"
    ]


def test_numbers_of_gpus_are_what_a_job_may_have() -> None:
    fast, cheap = pools_from({"pools": [FAST | {"gpus_per_node": 2}, CHEAP]}, source="pools.yaml")
    assert _counts(pool_goal(Goal(), fast, is_open=True)) == (1, 2, 4, 8)
    assert _counts(pool_goal(Goal(), cheap, is_open=True)) == (1, 2)
    assert _counts(pool_goal(Goal(num_gpus=(2, 4)), cheap, is_open=False)) == (2,)
    goal = Goal(num_gpus=(4,), engines=("ddp",), objective=Objective.SPEED)  # type: ignore[arg-type]
    found, refused = pool_plans(
        memplan.load_model("gpt2"), goal, (fast, cheap), times=None, is_open=False
    )
    assert found.best is not None
    assert found.best.setup.num_nodes == 2
    assert refused.refused == "has 2 GPUs for a job, fewer than are asked for"


def _counts(goal: Goal | None) -> tuple[int, ...]:
    assert goal is not None
    return goal.num_gpus


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h100"), "--gpu: --pools says which cards there are"),
        (("--gpus", "16"), "fast: has 8 GPUs for a job"),
        (("--report", "x.html"), "--report: a page is of one GPU"),
    ],
)
def test_what_does_not_go_together(
    run: Run, file: Callable[..., str], words: tuple[str, ...], said: str
) -> None:
    outcome = run("plan", "gpt2", *words, "--pools", file(FAST, CHEAP))
    assert outcome.exit_code in (2, 3)
    assert outcome.stderr.splitlines()[-1].startswith("memplan: error: ")
    assert said in outcome.stderr
