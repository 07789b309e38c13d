"""``memplan estimate`` as a user types it."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.memory.replaying.replay import Replayer
from memplan.report.rows.schema import COLUMN_MEANINGS, ESTIMATE_MEANINGS, HINT_MEANINGS

pytestmark = pytest.mark.long

Run = Callable[..., Any]


def test_account(run: Run) -> None:
    done = run("estimate", "llama-3.2-1b", "--gpu", "h100", "--checkpointing", "full")
    assert done.exit_code == 0
    for words in ("llama-3.2-1b", "1.24B", "H100-80", "backward", "optimizer states", "fits"):
        assert words in done.stdout
    assert done.stderr == ""


def test_a_table_plays_no_more_runs_than_its_answer_asks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure that a line about all setups wants of each once tripled the first command's time (944 replays for 92)."""
    played = []
    on_card = Replayer.on_card

    def counted(self: Replayer, *arguments: Any, **options: Any) -> Any:
        played.append(arguments)
        return on_card(self, *arguments, **options)

    monkeypatch.setattr(Replayer, "on_card", counted)
    assert run(*JOB, "--seq-len", "536").exit_code == 0  # a length that no other test has played
    assert 0 < len(played) <= 150


WIDTHS = (40, 60, 80, 120, 200)
JOB = ("estimate", "t5-3b", "--gpus", "8")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (["estimate", "llama-3.2-1b"], ["estimate", "llama-3.2-1b", "--gpus", "8"]):
        done = run(*arguments)
        assert done.exit_code == 0
        assert max(len(line) for line in done.stdout.splitlines()) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_loses_anything_without_a_word(
    run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    wide = run(*JOB, "--assumptions").stdout
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = run(*JOB, "--assumptions").stdout
    assert "Not shown" not in wide
    table = wide.split("\n\n")[1].splitlines()
    told = " ".join(narrow.partition("Not shown, for want of room: ")[2].split("\n\n")[0].split())
    left_out = {"allocated", "GiB", "in", "phase", "CPU"} & set(told.replace(",", "").split())
    assert bool(left_out) == (width < 96)
    starts = {"allocated": "allocated", "phase": "in ", "CPU": "CPU"}
    gone = {
        word
        for name, header in starts.items()
        if name in left_out
        for line in table
        for word in line[_place(table[0], header) :].split()[:1]
    }
    assert set(wide.replace("─", "").split()) - set(narrow.replace("─", "").split()) <= gone
    blocks = narrow.split(" setup ")[1:]
    for block in blocks:
        lines = block.split("\n\n")[0].splitlines()
        starts = [line.split()[0] for line in lines if line.startswith((" DDP", " ZeRO", " FSDP"))]
        assert starts[0] == "DDP"
        assert len(starts) == 10


def _place(header: str, name: str) -> int:
    """Where a column begins: figures are set to the right of a header as wide as they are."""
    return header.index(name) - (2 if name == "CPU" else 0)


def test_the_answer_comes_first(run: Run) -> None:
    lines = run(*JOB).stdout.splitlines()
    assert lines[3].startswith("t5-3b (seq2seq-lm) · 2.85B · 8 GPUs · 512 tokens")
    assert [line.split()[:4] for line in lines[:3]] == [
        ["V100-32", "fits", "from", "ZeRO-1"],
        ["A100-80", "fits", "with", "DDP"],
        ["H100-80", "fits", "with", "DDP"],
    ]
    assert all(
        re.search(r"needs [\d.]+-[\d.]+ of [\d.]+ GiB +batch <= \d", line) for line in lines[:3]
    )
    assert lines[4] == ""


CELL = re.compile(r"(fits|tight|OOM) +([\d.,]+)-([\d.,]+)")


def test_every_verdict_is_checked_by_the_eye(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    job = ("estimate", "llama-3.1-8b", "--gpus", "8", "--seq-len", "4096", "--gpu")
    for gpu in ("v100", "a100-40gb", "a100", "h200"):
        shown = run(*job, gpu).stdout
        (capacity,) = {float(each) for each in re.findall(r"of ([\d.]+) GiB", shown)}
        cells = CELL.findall(shown)
        assert len(cells) == 10
        for verdict, low, high in cells:
            ends = float(low.replace(",", "")), float(high.replace(",", ""))
            # One decimal is shown.
            if verdict == "fits":
                assert ends[1] <= capacity + 0.1
            elif verdict == "OOM":
                assert ends[0] >= capacity - 0.1
            else:
                assert ends[0] - 0.1 <= capacity <= ends[1] + 0.1


def test_the_largest_batch_stands_in_every_fitting_cell_or_in_none(run: Run) -> None:
    table = run(*JOB).stdout.partition("\n\n")[2]
    assert "<=" not in table
    table = run(*JOB, "--gpu", "a100").stdout.partition("\n\n")[2]
    cells = [line for line in table.splitlines() if " fits " in line]
    assert len(cells) == 10
    assert all(re.search(r"<= \d+$", line) for line in cells)


def test_what_does_not_fit_says_what_to_type(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = run("estimate", "t5-3b", "--gpus", "1", "--gpu", "v100").stdout.splitlines()
    assert lines[0].startswith("V100-32  does not fit   needs ")
    options = re.match(r" +to fit: (--.*) \(", lines[1])
    assert options is not None
    changed = run("estimate", "t5-3b", "--gpus", "1", "--gpu", "v100", *options[1].split()).stdout
    assert changed.splitlines()[0].startswith("V100-32  fits")


def test_the_allocator_comes_first_where_it_suffices(run: Run) -> None:
    job = ("estimate", "llama-3.1-8b", "--precision", "bf16", "--checkpointing", "full",
           "--seq-len", "16384", "--gpu", "h100")  # fmt: skip
    shown = run(*job).stdout
    assert "to fit: --allocator expandable (" in shown
    assert "PYTORCH_CUDA_ALLOC_CONF" not in shown
    assert "H100-80  fits" in run(*job, "--allocator", "expandable").stdout


def test_the_legend_is_a_line_or_all(run: Run) -> None:
    short, full = run(*JOB).stdout, run(*JOB, "--legend").stdout
    before, _, below = short.partition("\nGiB = 2^30 bytes; ")
    assert len(below.splitlines()) == 1
    assert full.startswith(before)
    assert "zero.Init" in full
    assert len(full.splitlines()) > len(short.splitlines())


def test_a_row_that_cards_share_names_neither_precision_nor_kernel(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = run("estimate", "t5-3b", "--gpus", "8").stdout
    table = [line for line in shown.splitlines() if line.startswith((" ZeRO", " FSDP", " DDP"))]
    assert any("ZeRO-3, cpu optimizer+params   " in line for line in table)
    assert not any("fp16" in line or "efficient" in line for line in table)


def test_rows_that_cards_do_not_share_are_named_by_the_card(run: Run) -> None:
    shown = run("estimate", "llama-3.2-1b", "--gpus", "2", "--gpu", "t4,h100").stdout
    assert " DDP, T4 " in shown
    assert " DDP, H100-80 " in shown
    assert "attention sdpa (math or cudnn)" in " ".join(shown.split())


def test_what_was_assumed_of_the_model_has_a_line_of_its_own(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "bloom", "n_layer": 2, "n_head": 8, "vocab_size": 512, "tie_word_embeddings": true}'
    )
    said = "hidden_size 64: not in the config, BloomConfig's default"
    assert f"Model: {said}" in run("estimate", str(file)).stdout
    assert f"Assumed: {said}" in run("estimate", str(file), "--assumptions").stdout.splitlines()
    for command in ("sweep", "flops"):
        assert f"Assumed: {said}" in run(command, str(file)).stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--freeze", "layers.12"), "freeze: layers.12-12: gpt2 has 12 layers, counted from 0"),
        (("--freeze", "layers.6-99"), "freeze: layers.6-99: gpt2 has 12 layers"),
        (("--freeze", "encoder"), "freeze: encoder: gpt2 has none"),
        (("--num-labels", "3"), "num_labels 3: the task causal-lm has no labels"),
    ],
)
def test_parts_that_a_model_lacks_are_refused(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    done = run("estimate", "gpt2", *options)
    assert done.exit_code == 3
    assert message in done.stderr


@pytest.mark.parametrize("parts", ["layers", "layers.0-11", "layers.11", "decoder"])
def test_parts_that_a_model_has_are_frozen(run: Run, parts: str) -> None:
    assert " trained" in run("estimate", "gpt2", "--freeze", parts).stdout


def test_zero_init_is_said_once(run: Run) -> None:
    job = ("estimate", "gpt2", "--gpus", "8", "--zero", "3", "--offload", "none")
    for given, said in (("true", "under zero.Init"), ("false", "zero_init False")):
        done = run(*job, "--gpu", "h100", "--engine-option", f"zero_init={given}").stdout
        assert said in " ".join(done.split())
        assert len(re.findall(r"zero.Init|zero_init", done)) == 1


def test_json(run: Run) -> None:
    done = run("estimate", "llama-3.2-1b", "--gpu", "h100", "--gpu", "v100", "--format", "json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["assumptions"]
    assert [row["gpu"] for row in document["rows"]] == ["h100-sxm-80gb", "v100-sxm2-32gb"]
    row = document["rows"][0]
    parts = sum(
        row[name]
        for name in (
            "parameters_bytes", "gradients_bytes", "optimizer_states_bytes", "inputs_bytes",
            "activations_bytes", "logits_and_loss_bytes", "temporaries_bytes",
            "kernel_scratch_bytes", "buffers_bytes",
        )
    )  # fmt: skip
    assert parts == row["peak_bytes"]


def test_csv_holds_the_same_rows(run: Run) -> None:
    arguments = ("estimate", "llama-3.2-1b", "--gpu", "h100", "--format")
    row = json.loads(run(*arguments, "json").stdout)["rows"][0]
    from_csv = next(csv.DictReader(io.StringIO(run(*arguments, "csv").stdout)))
    assert from_csv["peak_bytes"] == str(row["peak_bytes"])
    assert list(from_csv) == list(row)


def test_markdown_is_for_people(run: Run) -> None:
    page = run(*JOB, "--format", "markdown").stdout
    assert page.startswith("## t5-3b (seq2seq-lm)\n")
    assert "* **V100-32: fits from ZeRO-1**, needs 17.9-20.6 of 31.7 GiB, micro-batch" in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert len(tables) == 2 + 10
    assert tables[2].startswith("| DDP | 53.3")
    assert len({line.count(" | ") for line in tables if "---" not in line}) == 1
    assert "### Assumptions" in page
    assert not re.search(r"\d{7}", page)


def test_markdown_of_one_setup(run: Run) -> None:
    job = ("estimate", "t5-3b", "--gpu", "v100", "--format", "markdown")
    page = run(*job).stdout
    assert "\n* **V100-32: does not fit**, needs " in page
    assert "\n  * to fit: --" in page
    assert "\n### Where the bytes are\n" in page
    assert "CPU RAM per node: " in page


def test_markdown_takes_no_markup_from_a_name(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    config = {"model_type": "gpt2", "name": "<b>|[x](y)", "n_layer": 2, "n_embd": 64, "n_head": 2}
    file.write_text(json.dumps(config))
    page = run("estimate", str(file), "--format", "markdown").stdout
    assert "<b>" not in page


def test_deepspeed_tables(run: Run) -> None:
    done = run("estimate", "t5-3b", "--gpus", "8", "--deepspeed")
    for line in (
        "127.48GB |   5.31GB | offload_optimizer=cpu",
        "127.48GB |  15.93GB | offload_optimizer=none",
        "71.71GB |   0.12GB |", "127.48GB |   0.12GB |", "63.74GB |   0.79GB |",
        "127.48GB |   0.79GB |", "1.47GB |   6.10GB |", "127.48GB |   6.10GB |",
    ):  # fmt: skip
        assert line in done.stdout


def test_deepspeed_tables_from_counts(run: Run) -> None:
    done = run("estimate", "--params", "2851e6", "--largest-layer", "32e6", "--gpus", "8")
    for figure in ("127.45GB |   5.31GB", "71.69GB |   0.12GB", "63.72GB |   0.78GB",
                   "1.43GB |   6.09GB"):  # fmt: skip
        assert figure in done.stdout


def test_deepspeed_tables_without_a_largest_layer(run: Run) -> None:
    done = run("estimate", "--params", "2851e6", "--gpus", "8")
    assert "127.45GB |   5.31GB" in done.stdout
    assert "ZeRO-3 is left out: its table needs --largest-layer" in done.stdout
    assert "largest layer params" not in done.stdout
    rows = run("estimate", "--params", "2851e6", "--gpus", "8", "--format", "json").stdout
    assert {row["zero_stage"] for row in json.loads(rows)["rows"]} == {2}


def test_deepspeeds_ram_of_two_nodes_in_both_forms(run: Run) -> None:
    done = run("estimate", "t5-11b", "--gpus", "16", "--nodes", "2", "--deepspeed")
    assert "by the code 1010.95GB" in done.stdout
    assert "documented 505.48GB" in done.stdout
    one_node = run("estimate", "t5-11b", "--gpus", "8", "--deepspeed").stdout
    assert "505.48GB (4 x" not in one_node


def test_an_unlisted_card(run: Run) -> None:
    done = run("estimate", "llama-3.2-1b", "--gpu-memory", "46GiB")
    assert "of 46.0 GiB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["t5-3bb"], 3, "t5-3b"),
        (["llama-3.2-1b", "--gpu", "h1000"], 3, "Did you mean"),
        (["llama-3.2-1b", "--gpus", "0"], 2, "--gpus"),
        (["llama-3.2-1b", "--precision", "int3"], 3, "precision"),
        (["llama-3.2-1b", "--precision", "bf16-master"], 0, ""),
        (["llama-3.2-1b", "--batch-size", "0"], 3, "--batch-size: must be"),
        (["llama-3.2-1b", "--freeze", "tail"], 3, "freeze"),
        (["llama-3.2-1b", "--gpu-memory", "46"], 2, "46GiB"),
        (["llama-3.2-1b", "--batchsize", "2"], 2, "--batch-size"),
        (["llama-3.2-1b", "--engine-option", "overlap_comm"], 2, "KEY=VALUE"),
        ([], 2, "MODEL"),
        (["--params", "many"], 2, "whole number"),
        (["llama-3.2-1b", "--deepspeed", "--gpus", "8", "--nodes", "3"], 3, "nodes"),
        (["./nowhere/config.json"], 3, "nowhere"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], code: int, words: str) -> None:
    done = run("estimate", *arguments)
    assert done.exit_code == code, done.stderr
    if code:
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "list"),
        ("{", "JSON"),
        ('{"model_type": "llama", "hidden_size": -4096}', "hidden_size"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000000000000000000000000}',
         "num_hidden_layers"),
        ('{"model_type": "gpt2", "n_embd": 100, "n_head": 12}', "divisible"),
        ('{"hidden_size": 4096}', "model_type"),
        ('{"model_type": "llamma"}', "llama"),
    ],
)  # fmt: skip
def test_bad_config_files(run: Run, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    done = run("estimate", str(tmp_path))
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_json_holds_the_hints(run: Run) -> None:
    command = ("estimate", "llama-3.1-8b", "--gpus", "8", "--zero", "1", "--offload", "none")
    outcome = run(*command, "--gpu", "v100,a100", "--format", "json")
    document = json.loads(outcome.stdout)
    assert document["memplan_version"] == memplan.__version__
    assert list(document["rows"][0]) == [*COLUMN_MEANINGS, *ESTIMATE_MEANINGS]
    found = {row["gpu"]: row for row in document["rows"]}
    assert found["v100-sxm2-32gb"]["largest_micro_batch"] == 0
    assert found["a100-sxm4-80gb"]["largest_micro_batch"] >= 1
    assert found["a100-sxm4-80gb"]["deciding_phase"]
    (hint,) = document["hints"]
    assert list(hint) == list(HINT_MEANINGS)
    assert document["rows"][hint["row"]]["gpu"] == hint["gpu"] == "v100-sxm2-32gb"
    changed = run("estimate", "llama-3.1-8b", "--gpus", "8", *hint["options"].split(),
                  "--gpu", "v100", "--format", "json")  # fmt: skip
    verdicts = [row["verdict"] for row in json.loads(changed.stdout)["rows"]]
    assert hint["verdict"] in verdicts
    assert hint["saved_bytes"] >= hint["missing_bytes"] > 0


def test_without_a_gpu_to_fail_there_are_no_hints(run: Run) -> None:
    document = json.loads(run("estimate", "gpt2", "--gpu", "h100", "--format", "json").stdout)
    assert document["hints"] == []
    assert document["rows"][0]["largest_micro_batch"] > 1


@pytest.mark.parametrize("option", ["--time", "--lifetimes"])
def test_lines_of_one_gpu_alone_have_its_figures(run: Run, option: str) -> None:
    """On a card with other kernels a setup has a line of its own, empty for the others."""
    done = run("estimate", "llama-3.2-1b", "--gpus", "8", "--engine", "ddp,deepspeed", option)
    assert done.exit_code == 0
    assert "DDP, V100-32" in done.stdout
    assert "DDP, H100-80" in done.stdout
