"""For one setup and one card every command, format and the Python API give the same figures.

Jobs are drawn at random, always the same ones: a few here, 300 with ``make fuzz``.
"""

import csv
import io
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest

import memplan
from docs.browser import answering
from memplan.report.estimates.answer import needed_text
from memplan.search.batch import largest_micro_batch
from tests.cli.test_hints import rows_of

Run = Callable[..., Any]

NUM_IN_CI = 4
NUM_JOBS = 300
NUM_AT_ONCE = 25
"""Jobs of one test, so that a part of them can be asked for: ``pytest -m fuzz -k "answer[25]"``."""

MODELS = ("gpt2", "t5-small", "bert-base-uncased", "qwen2.5-0.5b", "llama-3.2-1b", "vit-base")
CARDS = ("t4", "v100-16gb", "a100-40gb", "h100", "4090", "l4")
ENGINES: tuple[dict[str, Any], ...] = (
    {"engine": "ddp"},
    {"engine": "deepspeed", "zero": 1},
    {"engine": "deepspeed", "zero": 2},
    {"engine": "deepspeed", "zero": 3, "offload": "cpu"},
    {"engine": "fsdp"},
    {"engine": "fsdp1"},
)
FIGURES = (
    "peak_bytes", "required_bytes", "reserved_bytes", "total_low_bytes", "total_high_bytes",
    "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One setup on one card, as every command can say it."""

    model: str
    card: str
    gpus: int
    engine: dict[str, Any]
    batch: int
    tokens: int
    checkpointing: str
    precision: str | None

    @property
    def ways(self) -> "list[Job]":
        """Stage 3 that offloads its states does so with its weights, and without."""
        if "offload" not in self.engine:
            return [self]
        places = ("none", "cpu")
        return [replace(self, engine={**self.engine, "offload-param": each}) for each in places]

    @property
    def options(self) -> list[str]:
        """What all commands take."""
        found = ["--gpu", self.card, "--gpus", str(self.gpus), "--batch-size", str(self.batch)]
        for name, value in self.engine.items():
            found += [f"--{name}", str(value)]
        if "offload" not in self.engine:
            found += ["--offload", "none"]
        if self.precision is not None:
            found += ["--precision", self.precision]
        if not self.model.startswith("vit"):
            found += ["--seq-len", str(self.tokens)]
        return [*found, "--checkpointing", self.checkpointing]

    @property
    def setup(self) -> memplan.TrainingSetup:
        """The same in Python."""
        names = {
            "zero": "zero_stage",
            "offload": "offload_optimizer",
            "offload-param": "offload_param",
        }
        fields = {names.get(name, name): value for name, value in self.engine.items()}
        if not self.model.startswith("vit"):
            fields["seq_len"] = self.tokens
        return memplan.TrainingSetup(
            num_gpus=self.gpus, micro_batch_size=self.batch, checkpointing=self.checkpointing,
            precision=self.precision, **fields,
        )  # type: ignore[arg-type]  # fmt: skip


def jobs() -> Iterator[Job]:
    """Always the same ones."""
    chance = random.Random(28)
    while True:
        engine = chance.choice(ENGINES)
        halves = {"ddp": "bf16", "fsdp": "bf16-mixed"}.get(engine["engine"])
        yield Job(
            model=chance.choice(MODELS),
            card=chance.choice(CARDS),
            gpus=chance.choice((1, 2, 4, 8))
            if engine["engine"] == "ddp"
            else chance.choice((2, 8)),
            engine=engine,
            batch=chance.choice((1, 2, 3, 8, 24, 64)),
            tokens=chance.choice((96, 128, 384, 512)),
            checkpointing=chance.choice(("none", "full")),
            precision=chance.choice((None, halves)),
        )


def figures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in FIGURES}


def check(job: Job, run: Run) -> None:
    model, card = memplan.load_model(job.model), memplan.load_gpu(job.card)
    answer = memplan.estimate(model, job.setup, gpu=card)
    truth = figures(answer.to_dict())
    needed = f"{needed_text(answer.total_bytes)} of "
    assert answer.gpu is not None
    total, capacity = answer.total_bytes, answer.gpu.capacity_bytes
    assert {"fits": total.high <= capacity, "tight": total.low <= capacity < total.high,
            "OOM": total.low > capacity}[truth["verdict"]], truth  # fmt: skip

    swept = memplan.sweep(model, _axes(job), gpus=[card])
    assert [figures(each.to_dict()) for result in swept for each in result.estimates] == [truth]

    command = [job.model, *job.options]
    (alone,) = rows_of(run("estimate", *command, "--format", "json"))
    assert figures(alone) == truth
    assert alone["largest_micro_batch"] == largest_micro_batch(model, job.setup, card)
    (of_sweep,) = rows_of(run("sweep", *command, "--format", "json"))
    assert figures(of_sweep) == truth
    (written,) = csv.DictReader(io.StringIO(run("sweep", *command, "--format", "csv").stdout))
    assert figures(written) == {name: str(value) for name, value in truth.items()}
    for printed in (
        run("estimate", *command).stdout,
        run("estimate", *command, "--format", "markdown").stdout,
        run("explain", *command).stdout,
    ):
        assert needed in printed, printed
        assert truth["verdict"].replace("OOM", "does not fit") in printed
    assert needed.removesuffix(" of ") in run("sweep", *command).stdout

    _, page, _, *_ = answering.answer(["estimate", *command], {}, columns=100, colour=False)
    assert page == run("estimate", *command).stdout


def _axes(job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = {"offload_optimizer": "none"}
    for name in (
        "num_gpus", "engine", "zero_stage", "offload_optimizer", "offload_param", "micro_batch_size", "seq_len",
        "checkpointing", "precision",
    ):  # fmt: skip
        value = getattr(job.setup, name)
        if value is not None:
            fields[name] = value
    return fields


def check_table(job: Job, run: Run) -> None:
    """Every row of a comparison, and every setup of a plan, asked for alone."""
    model, card = memplan.load_model(job.model), memplan.load_gpu(job.card)
    length = [] if job.model.startswith("vit") else ["--seq-len", str(job.tokens)]
    common = ["--gpu", job.card, "--gpus", str(job.gpus), *length]
    table = rows_of(run("estimate", job.model, *common, "--format", "json"))
    for row in table:
        alone = memplan.estimate(model, _said(job, row), gpu=card)
        assert figures(row) == figures(alone.to_dict()), row
        assert row["largest_micro_batch"] == largest_micro_batch(model, alone.setup, card)
    goal = memplan.Goal(num_gpus=(job.gpus,), base=replace(job.setup, engine=None, zero_stage=None,
                        offload_optimizer="none", precision=None, checkpointing="none"))  # fmt: skip
    found = memplan.plan(model, goal, gpu=card)
    for planned in found.setups:
        alone = memplan.estimate(model, planned.setup, gpu=card)
        assert figures(planned.estimate.to_dict()) == figures(alone.to_dict())
        assert alone.verdict is memplan.Verdict.FITS
        larger = replace(planned.setup, micro_batch_size=planned.setup.micro_batch_size + 1)
        beyond = memplan.estimate(model, larger, gpu=card)
        assert beyond.verdict is not memplan.Verdict.FITS or beyond.flushes_every_step


def _said(job: Job, row: dict[str, Any]) -> memplan.TrainingSetup:
    return memplan.TrainingSetup(
        num_gpus=row["num_gpus"], engine=row["engine"], zero_stage=row["zero_stage"],
        offload_optimizer=row["offload_optimizer"], offload_param=row["offload_param"],
        seq_len=None if job.model.startswith("vit") else job.tokens,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _page(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "FOLDER", tmp_path / "question")
    monkeypatch.setattr(answering, "_describe_terminal", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
def test_a_setup_has_one_answer(run: Run) -> None:
    drawn = jobs()
    for _ in range(NUM_IN_CI):
        for way in next(drawn).ways:
            check(way, run)


@pytest.mark.long
def test_tables_and_plans_have_it_too(run: Run) -> None:
    drawn = jobs()
    for _ in range(NUM_IN_CI // 2):
        check_table(next(drawn), run)


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(0, NUM_JOBS, NUM_AT_ONCE))
def test_every_setup_has_one_answer(
    run: Run, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    num_tried = num_ways = 0
    for job in islice(jobs(), first, first + NUM_AT_ONCE):
        for way in job.ways:
            check(way, run)
            num_ways += 1
        check_table(job, run)
        num_tried += 1
        with capsys.disabled():
            print(f"\r{num_tried} jobs from {first} on, asked in {num_ways} ways", end="")
    assert num_tried == NUM_AT_ONCE


def test_what_lives_with_less_room_and_dies_with_more_does_not_fit() -> None:
    """Between both ends of what NCCL and the context may take: a plan once took this batch."""
    setup = memplan.TrainingSetup(
        num_gpus=8, engine="fsdp", micro_batch_size=250, seq_len=128, precision="bf16",
        checkpointing="full",
    )  # type: ignore[call-overload]  # fmt: skip
    card = memplan.load_gpu("4090")
    answer = memplan.estimate("gpt2", setup, gpu=card)
    least = card.capacity_bytes - answer.overhead_bytes.high
    assert answer.run.on_card(least).died_at is None
    assert not answer.run.is_enough(least)
    assert answer.verdict is memplan.Verdict.OOM
    assert not answer.fits_within(card.capacity_bytes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "pattern"),
    [
        (("estimate", "llama-3-8b", "--lora", "16", "--gpu", "4090", "--engine", "ddp",
          "--checkpointing", "full"), r"RTX4090 +fits +needs ([\d.]+-[\d.]+) of"),
        (("plan", "llama-3-8b", "--lora", "16", "--gpu", "4090", "--gpus", "1", "--engine", "ddp",
          "--batch-size", "1"), r"needs ([\d.]+-[\d.]+) of 23.5 GiB"),
    ],
)  # fmt: skip
def test_a_plan_and_an_estimate_agree(command: tuple[str, ...], pattern: str, run: Run) -> None:
    """A plan once said that nothing fits where an estimate said that it does."""
    done = run(*command)
    if command[0] == "plan" and done.exit_code == 2:
        done = run(*command[:-2])
    assert re.search(pattern, done.stdout), done
