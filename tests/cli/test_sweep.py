import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import memplan.cli
from memplan.cli.output import progress

SWEEP = (
    "sweep", "llama-3.2-1b", "--gpus", "8,16", "--zero", "1-3", "--batch-size", "1..4",
    "--seq-len", "512", "--gpu", "v100-32gb,h100",
)  # fmt: skip
Run = Callable[..., Any]


def rows_of(text: str) -> list[dict[str, Any]]:
    document = json.loads(text)
    document.pop("hints", None)  # an estimate's
    assert list(document) == [
        "schema_version", "memplan_version", "model_fingerprint", "assumptions", "rows"
    ]  # fmt: skip
    return list(document["rows"])


def test_all_formats_hold_the_same_rows(run: Run) -> None:
    rows = rows_of(run(*SWEEP, "--format", "json").stdout)
    assert len(rows) == 2 * 3 * 3 * 2
    lines = run(*SWEEP, "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == rows
    table = list(csv.DictReader(StringIO(run(*SWEEP, "--format", "csv").stdout)))
    assert [list(each) for each in table] == [list(each) for each in rows]
    assert [int(each["peak_bytes"]) for each in table] == [each["peak_bytes"] for each in rows]
    markdown = run(*SWEEP, "--format", "markdown").stdout.splitlines()
    assert len(markdown) == len(rows) + 2
    assert markdown[1] == "|" + " --- |" * markdown[0].count(" | ") + " --- |"


def test_rows_are_those_of_an_estimate(run: Run) -> None:
    named = ("llama-3.2-1b", "--gpus", "8", "--engine", "deepspeed", "--zero", "2", "--gpu", "h100")
    estimates = rows_of(run("estimate", *named, "--offload", "none", "--format", "json").stdout)
    swept = rows_of(run("sweep", *named, "--format", "json").stdout)
    for row in estimates:
        assert row.pop("largest_micro_batch") > 0
    assert swept == [each for each in estimates if each["offload_optimizer"] == "none"]


def test_the_table_has_a_row_for_each_setup_and_a_column_for_each_gpu(run: Run) -> None:
    printed = run(*SWEEP).stdout
    assert sum(" ZeRO-" in line for line in printed.splitlines()) == 18
    assert "V100-32" in printed
    assert "H100-80" in printed


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param((), 0, id="nothing asked"),
        pytest.param(("--check", "any"), 0, id="any"),
        pytest.param(("--check", "all"), 5, id="all"),
        pytest.param(("--check",), 5, id="alone"),
        pytest.param(("--check", "--format", "csv"), 5, id="alone before another"),
        pytest.param(("--fail-on", "oom"), 5, id="fail on OOM"),
        pytest.param(("--check", "any", "--fail-on", "tight"), 0, id="any for certain"),
    ],
)
def test_checks(run: Run, options: tuple[str, ...], code: int) -> None:
    command = ("sweep", "llama-3.1-8b", "--gpus", "8", "--zero", "0,2", "--gpu", "h100")
    outcome = run(*command, *options)
    assert outcome.exit_code == code
    assert ("check " in outcome.stderr) is (code == 5)


def test_estimate_checks_its_one_setup(run: Run) -> None:
    command = ("estimate", "llama-3.1-8b", "--gpu", "h100", "--check")
    assert run(*command).exit_code == 5
    assert run(*command, "--precision", "bf16").exit_code == 0
    for size, code in (("2", 0), ("4", 5)):
        tight = ("--precision", "bf16", "--batch-size", size, "--fail-on", "tight")
        assert run(*command, *tight).exit_code == code


def test_a_baseline_shows_what_moved(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(run(*SWEEP, "--format", "json").stdout)
    same = run(*SWEEP, "--baseline", str(path))
    assert same.exit_code == 0
    assert "0 of 36 rows moved" in same.stdout
    document = json.loads(path.read_text())
    document["rows"][0]["peak_bytes"] = int(document["rows"][0]["peak_bytes"] * 0.97)
    document["rows"].pop()
    path.write_text(json.dumps(document))
    known = ("--baseline", str(path), "--unmatched", "allow")
    moved = run(*SWEEP, *known, "--tolerance", "1%")
    assert moved.exit_code == 5
    assert "1 of 35 rows moved, 1 for the worse beyond 1 %; 1 new, 0 gone" in moved.stdout
    assert "(+3.09 %)" in moved.stdout
    assert run(*SWEEP, *known, "--tolerance", "5%").exit_code == 0
    scripted = run(*SWEEP, *known, "--format", "json")
    assert scripted.exit_code == 5
    assert len(rows_of(scripted.stdout)) == 36
    assert "rows moved" in scripted.stderr


BASELINE = ("sweep", "gpt2", "--gpus", "8", "--zero", "1,2", "--gpu", "h100")


@pytest.fixture
def baseline(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "baseline.json"
    path.write_text(run(*BASELINE, "--format", "json").stdout)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(("--zero", "3"), "1 rows are new and 2 gone", id="none matches"),
        pytest.param(("--zero", "1"), "0 rows are new and 1 gone", id="one is gone"),
        pytest.param(("--zero", "1-3"), "1 rows are new and 0 gone", id="one is new"),
        pytest.param(("--kernels", "liger"), "2 rows are new and 2 gone", id="another setting"),
        pytest.param(("--engine-option", "overlap_comm=true"), "2 rows are new", id="an option"),
    ],
)
def test_a_baseline_that_does_not_match_fails_unless_allowed(
    run: Run, baseline: Path, changes: tuple[str, ...], said: str
) -> None:
    command = BASELINE if "--zero" not in changes else BASELINE[:4] + BASELINE[6:]
    outcome = run(*command, *changes, "--baseline", str(baseline))
    assert outcome.exit_code == 5
    assert said in outcome.stderr
    turned = (": not in the baseline", ": only in the baseline", " -> ")
    assert any(words in outcome.stdout for words in turned)
    allowed = run(*command, *changes, "--baseline", str(baseline), "--unmatched", "allow")
    assert allowed.exit_code == 0
    assert " new, " in allowed.stdout


def test_a_baseline_of_another_model_fails(run: Run, baseline: Path) -> None:
    command = ("sweep", "distilgpt2", *BASELINE[2:], "--baseline", str(baseline))
    outcome = run(*command)
    assert outcome.exit_code == 5
    assert "it is of a model of another shape" in outcome.stderr
    assert run(*command, "--unmatched", "allow").exit_code == 0


def test_a_baseline_knows_a_model_in_another_folder(run: Run, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}
    for folder in ("checkout-1", "checkout-2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "baseline.json"
    command = ("estimate", str(tmp_path / "checkout-1"), "--gpu", "h100")
    path.write_text(run(*command, "--format", "json").stdout)
    document = json.loads(path.read_text())
    assert document["memplan_version"]
    assert len(document["model_fingerprint"]) == 16
    moved = ("estimate", str(tmp_path / "checkout-2"), "--gpu", "h100")
    assert run(*moved, "--baseline", str(path)).exit_code == 0
    (tmp_path / "checkout-2" / "config.json").write_text(json.dumps({**config, "n_head": 8}))
    assert run(*moved, "--baseline", str(path)).exit_code == 5


def test_a_baseline_of_another_memplan_says_so(run: Run, baseline: Path) -> None:
    document = json.loads(baseline.read_text())
    document["memplan_version"] = "0.0.1"
    document["model_fingerprint"] = "of another kind"
    baseline.write_text(json.dumps(document))
    outcome = run(*BASELINE, "--baseline", str(baseline))
    assert outcome.exit_code == 0
    assert "the baseline is of memplan 0.0.1" in outcome.stdout


@pytest.mark.parametrize("command", ["sweep", "estimate"])
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param(("--fail-on", "tigt"), 2, "Did you mean 'tight'", id="verdict"),
        pytest.param(("--check=al",), 2, "Did you mean 'all'", id="scope"),
        pytest.param(("--baseline", "none.json"), 3, "no such file", id="no baseline"),
        pytest.param(("--tolerance", "2%"), 2, "give --baseline", id="tolerance alone"),
        pytest.param(("--unmatched", "allow"), 2, "give --baseline", id="unmatched alone"),
    ],
)
def test_a_bad_check_is_refused_before_anything_is_printed(
    run: Run, command: str, options: tuple[str, ...], code: int, message: str
) -> None:
    outcome = run(command, "gpt2", *options)
    assert (outcome.exit_code, outcome.stdout) == (code, "")
    assert message in outcome.stderr


def test_what_compile_makes_of_an_unseen_run_is_never_said_to_fit(run: Run) -> None:
    engine = ("--gpus", "8", "--engine", "deepspeed", "--zero", "3", "--compile", "layer")
    command = ("estimate", "gpt2", "--gpu", "h100", *engine)
    for row in rows_of(run(*command, "--format", "json").stdout):
        assert row["verdict"] == "states fit"
        assert row["left_out"] == "what torch.compile keeps where ZeRO-3's hooks break its graphs"
    assert run(*command, "--fail-on", "tight").exit_code == 5
    printed = run(*command).stdout
    assert "states fit" in printed
    assert "no verdict says fits" in " ".join(printed.split())


def test_what_cannot_be_is_said(run: Run) -> None:
    command = ("sweep", "llama-3.2-1b", "--gpus", "8", "--zero", "0,1", "--offload", "none,cpu")
    assert "Left out, 1 combination: offload_optimizer" in run(*command).stdout
    scripted = run(*command, "--format", "csv")
    assert "Left out, 1 combination" in scripted.stderr
    assert len(scripted.stdout.splitlines()) == 1 + 3 * 3


def test_options_are_laid_over_a_sweep_file(run: Run, checkout: Path) -> None:
    path = str(checkout / "configs" / "sweeps" / "xlm-roberta-xxl.yaml")
    command = ("sweep", path, "--zero", "3", "--gpus", "32", "--gpu", "h100", "--format", "json")
    rows = rows_of(run(*command).stdout)
    assert [(each["num_gpus"], each["zero_stage"], each["gpu"]) for each in rows] == [
        (32, 3, "h100-sxm-80gb")
    ] * 2


def test_a_setup_file_is_where_a_sweep_starts(run: Run, checkout: Path) -> None:
    path = str(checkout / "configs" / "setups" / "llama-8b-zero3.yaml")
    command = ("sweep", "llama-3.1-8b", "--setup", path, "--batch-size", "1,2", "--format", "json")
    rows = rows_of(run(*command, "--gpu", "h100").stdout)
    assert {(each["zero_stage"], each["seq_len"]) for each in rows} == {(3, 4096)}
    assert [each["micro_batch_size"] for each in rows] == [1, 2]


@pytest.mark.parametrize("figure", ["peak", "total", "headroom", "host"])
def test_a_matrix_of_each_figure(run: Run, figure: str) -> None:
    lines = run(*SWEEP, "--pivot", figure).stdout.splitlines()
    assert sum("batch \\ GPUs" in line for line in lines) == 3 * 2


def test_a_matrix_may_be_asked_for_without_naming_a_figure(run: Run) -> None:
    assert run(*SWEEP, "--pivot").stdout == run(*SWEEP, "--pivot", "peak").stdout


@pytest.mark.parametrize(
    ("axes", "head", "column"),
    [
        ("seq-len,batch", "tokens \\ batch", ["2", "4"]),
        ("total,batch,seq-len", "batch \\ tokens", ["512", "1,024"]),
        ("setup,gpu", "setup \\ gpu", ["A100-40", "H200"]),
    ],
)
def test_a_matrix_by_any_two(run: Run, axes: str, head: str, column: list[str]) -> None:
    command = ("sweep", "gpt2", "--gpus", "8", "--zero", "2,3", "--batch-size", "2,4",
               "--seq-len", "512,1024", "--gpu", "a100-40gb,h200")  # fmt: skip
    shown = run(*command, "--pivot", axes).stdout
    heads = [line for line in shown.splitlines() if head in line]
    # A matrix for each combination of the other three.
    assert len(heads) == 2 * 2
    assert all(line.split()[-2:] == column for line in heads)
    whole = run(*command, "--format", "json").stdout
    peaks = {f"{row['peak_bytes'] / 2**30:.1f}" for row in json.loads(whole)["rows"]}
    if not axes.startswith("total"):
        matrices = shown.partition(head)[2].partition("Rows:")[0]
        assert set(re.findall(r"\d+\.\d", matrices)) == peaks


def test_colours_are_a_heat_map(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    printed = run(*SWEEP, "--pivot").stdout
    assert "\x1b[30;42m" in printed
    assert "!" in run("sweep", "llama-3.1-8b", "--gpus", "2", "--pivot").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(("--gpus", "8-"), 2, "--gpus: the list of numbers '8-'", id="range"),
        pytest.param(("--zero", "4"), 3, "--zero: 4 is not one of", id="stage"),
        pytest.param(("--precision", "bf17"), 3, "Did you mean 'bf16'", id="precision"),
        pytest.param(("--pivot", "peek"), 2, "Did you mean 'peak'", id="figure"),
        pytest.param(("--pivot", "bach,gpus"), 2, "Did you mean 'batch'", id="axis"),
        pytest.param(("--pivot", "batch"), 2, "name the rows and the columns", id="one axis"),
        pytest.param(("--pivot", "--format", "csv"), 2, "leave it out", id="figure for scripts"),
        pytest.param(("--fail-on", "tigt"), 2, "Did you mean 'tight'", id="verdict"),
        pytest.param(("--tolerance", "5"), 2, "write 5% or 0.05", id="tolerance"),
        pytest.param(("--baseline", "none.json"), 3, "no such file", id="baseline"),
        pytest.param(("--gpu", "h1000"), 3, "h100", id="GPU"),
        pytest.param(("--setup", "a", "--training-args", "b"), 2, "name one", id="two starts"),
        pytest.param(("--global-batch-size", "0"), 2, "too small", id="global batch"),
        pytest.param(("--zero", "0", "--offload", "cpu"), 3, "from stage 1 on", id="nothing left"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    outcome = run("sweep", "llama-3.2-1b", *arguments)
    assert outcome.exit_code == code
    assert outcome.stdout == ""
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_no_progress_bar_where_nobody_looks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    axes = ("--batch-size", "1-16", "--gpus", "8", "--zero", "2,3", "--seq-len", "128")
    outcome = run("sweep", "gpt2", *axes, "--format", "csv")
    assert outcome.stderr == ""
    assert len(outcome.stdout.splitlines()) == 1 + 16 * 2 * 3


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_progress_bar_on_a_terminal_leaves_the_rows_alone(tmp_path: Path, checkout: Path) -> None:
    import pty

    axes = ("--batch-size", "1-24", "--seq-len", "128", "--gpus", "8", "--zero", "2,3")
    command = ("sweep", "gpt2", *axes, "--gpu", "h100", "--format", "csv")
    impatient = (
        "import sys, memplan.cli, memplan.cli.output.progress as progress; progress.PATIENCE_S = 0.0; "
        "sys.exit(memplan.cli.main())"
    )
    path = tmp_path / "rows.csv"
    reading, writing = pty.openpty()
    shown = b""
    with path.open("wb") as rows:
        process = subprocess.Popen(
            [sys.executable, "-c", impatient, *command], cwd=checkout, stdout=rows, stderr=writing,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
    os.close(writing)
    try:
        while piece := os.read(reading, 65536):  # a full terminal would stop the process
            shown += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    assert b"setups" in shown
    assert len(path.read_text().splitlines()) == 1 + 24 * 2


@pytest.mark.parametrize("given", [(), ("--pivot", "peak")])
def test_cards_without_bf16_are_said_to_run_another_precision(
    run: Run, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run("sweep", "gpt2", "--gpus", "2,8", "--gpu", "v100,h100", *given).stdout
    assert "fp16-master or bf16-master" in done
    assert "Of two precisions, fp16 is on V100-32: no bf16 there" in done
    alone = run("sweep", "gpt2", "--gpus", "2,8", "--gpu", "h100", *given).stdout
    assert "bf16-master" in alone
    assert " or " not in alone
    assert "Of two precisions" not in alone


@pytest.mark.parametrize("format_", ["table", "csv", "json"])
def test_several_processes_write_the_same_bytes(run: Run, format_: str) -> None:
    named = ("sweep", "gpt2", "--gpus", "1,8", "--zero", "2,3", "--gpu", "t4,v100", "--seq-len")
    command = (*named, "128", "--format", format_)
    assert run(*command) == run(*command, "--jobs", "2")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send to one process")
def test_an_interrupted_sweep_over_processes_ends_in_one_line() -> None:
    command = (
        "sweep", "gpt2", "--gpus", "1..64", "--batch-size", "1-64", "--gpu", "h100",
        "--jobs", "2", "--format", "csv",
    )  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "memplan", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        for _ in ("heading", "first row"):
            running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    line = r"memplan: interrupted: what was done by then is shown, \d+ of 448 setups\n"
    assert (running.returncode, re.sub(line, "one line", said)) == (130, "one line")


def test_the_textbooks_activations_beside_memplans(run: Callable[..., Any]) -> None:
    command = (
        "sweep",
        "llama-3.2-1b",
        "--batch-size",
        "1,2,4",
        "--gpu",
        "h100",
        "--precision",
        "bf16",
    )
    textbook = run(*command, "--pivot", "textbook,batch,seq-len").stdout
    # 16 layers of sbh(34 + 5as/h), s = h = 2048, a = 32.
    layers = 16 * 2048 * 2048 * (34 + 5 * 32) / 2**30
    for batch in (1, 2, 4):
        assert re.search(rf"^ +{batch} +{layers * batch:,.1f}", textbook, re.MULTILINE)
    own = run(*command, "--pivot", "activations,batch,seq-len").stdout
    (row,) = json.loads(run(*command[:3], "1", *command[4:], "--format", "json").stdout)["rows"]
    assert re.search(rf"^ +1 +{row['kept_after_forward_bytes'] / 2**30:,.1f}", own, re.MULTILINE)


def test_a_share_of_chunks_is_an_axis(run: Callable[..., Any]) -> None:
    pipeline = ("--gpus", "4", "--pp", "4", "--engine", "ddp", "--gradient-accumulation", "8")
    shares = ("--offload-activations", "chunks", "--offload-activations-ratio", "0,0.5,1")
    result = run("sweep", "gpt2", "--gpu", "a100-80gb", *pipeline, *shares)
    assert result.exit_code == 0, result.stderr
    assert "50%" in result.stdout


def test_sequence_parallel_is_an_axis(run: Callable[..., Any]) -> None:
    split = ("sweep", "llama-3.2-1b", "--gpus", "2", "--engine", "ddp", "--tp", "2")
    made = run(*split, "--sequence-parallel", "true,false")
    assert "TP2+SP" in made.stdout
    bad = run(*split, "--sequence-parallel", "yes")
    assert bad.exit_code == 2
    assert "neither true nor false" in bad.stderr


INTERRUPTED = """
import sys, memplan.cli, memplan.cli.output.progress as progress
whole = progress.with_progress
def some(sweep, *, alone):
    for number, each in enumerate(whole(sweep, alone=alone)):
        if number == 2:
            raise KeyboardInterrupt
        yield each
progress.with_progress = some
sys.argv[1:] = {words!r}
sys.exit(memplan.cli.main())
"""


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_what_was_done_before_an_interrupt_is_shown(checkout: Path, form: str) -> None:
    words = [
        "sweep",
        "gpt2",
        "--batch-size",
        "1,2,4,8",
        "--gpu",
        "h100",
        "--check",
        "--format",
        form,
    ]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(words=words)], cwd=checkout, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr == "memplan: interrupted: what was done by then is shown, 3 of 4 setups\n"
    if form == "table":
        assert done.stdout.startswith("H100-80  2 of 2 fit")
    elif form == "csv":
        assert len(done.stdout.splitlines()) == 3
    else:
        assert len(json.loads(done.stdout)["rows"]) == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_waited_for_is_said_on_a_terminal_alone(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = StringIO()
    monkeypatch.setattr(written, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress.waiting("in somebody else's process"):
        time.sleep(0.1)
    assert not written.getvalue()
    monkeypatch.setattr(memplan.cli, "owns_process", True)
    with progress.waiting("waiting"):
        time.sleep(0.3)
    text = "waiting ..."
    assert written.getvalue() == (f"{text}\r{' ' * len(text)}\r" if is_terminal else "")
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)
    with progress.waiting("waiting"):
        pass
    assert written.getvalue().count("waiting") == is_terminal
