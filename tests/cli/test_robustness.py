"""Terminals, disks, files and names as they can be: an answer or one line, never a traceback."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.cli.output.terminal import write_file
from memplan.errors import ConfigError, InputError, SetupError
from memplan.model.config import MAX_LAYERS

pytestmark = pytest.mark.long

Run = Callable[..., Any]

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip
EVIL = "evil\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"


def write(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def shell(command: str, checkout: Path, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    script = command.replace("memplan", f"{sys.executable} -m memplan", 1)
    return subprocess.run(
        ["bash", "-c", script], cwd=checkout, capture_output=True, check=False, timeout=60,
        env={**os.environ, **variables},
    )  # fmt: skip


# -- streams --------------------------------------------------------------------------------------

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@needs_full
@pytest.mark.parametrize("form", ["", "--format json", "--format csv"])
def test_a_full_disk_is_one_line(checkout: Path, form: str) -> None:
    done = shell(f"memplan gpus {form} > /dev/full", checkout)
    assert done.returncode == 3
    assert done.stderr == (
        b"memplan: error: cannot write the answer to stdout: No space left on device\n"
    )


@needs_full
def test_errors_that_cannot_be_written_keep_their_exit_code(checkout: Path) -> None:
    done = shell("memplan gpus no-such-gpu 2> /dev/full", checkout)
    assert (done.returncode, done.stdout) == (3, b"")


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param("memplan gpus >&-", 0, id="stdout"),
        pytest.param("memplan sweep gpt2 --zero 2 --format csv >&-", 0, id="stdout, rows"),
        pytest.param("memplan gpus no-such-gpu 2>&-", 3, id="stderr"),
        pytest.param("memplan sweep gpt2 --gpus 1,3 --global-batch-size 8 2>&-", 0, id="remarks"),
        pytest.param("memplan estimate gpt2 --check --gpu v100 >&- 2>&-", 0, id="both"),
    ],
)
def test_closed_streams(checkout: Path, command: str, code: int) -> None:
    done = shell(command, checkout)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr + done.stdout


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
@pytest.mark.parametrize(
    ("command", "encoding"),
    [
        ("memplan estimate {model}", "cp1252"),
        ("memplan estimate {model}", "ascii"),
        ("memplan estimate {model} --format json", "ascii"),
        ("memplan estimate {model} --format csv", "cp1252"),
        ("memplan explain {model} --engine fsdp --gpus 2", "ascii"),
        ("memplan compare {model} --formulas", "cp1252"),
        ("memplan flops {model}", "ascii"),
        ("memplan models {model} --tree", "ascii"),
    ],
)
def test_encodings_of_the_past(checkout: Path, tmp_path: Path, encoding: str, command: str) -> None:
    model = write(tmp_path / "Modell-ü-→-模型.json", LLAMA)
    done = shell(command.format(model=f"'{model}'"), checkout, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    done.stdout.decode(encoding)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("estimate", "{model}", "--gpu", "{card}"), id="account"),
        pytest.param(("estimate", "{model}", "--gpus", "8", "--gpu", "{card}"), id="comparison"),
        *(
            pytest.param(("estimate", "{model}", "--gpu", "{card}", "--format", form), id=form)
            for form in ("json", "csv", "markdown")
        ),
        pytest.param(("sweep", "{model}", "--gpu", "{card}", "--zero", "1,2"), id="sweep"),
        pytest.param(("models", "{model}"), id="models"),
        pytest.param(("explain", "{model}"), id="explain"),
        pytest.param(("estimate", "{bad}"), id="a message"),
        pytest.param(("estimate", EVIL), id="no such model"),
        pytest.param(("estimate", "gpt2", "--gpu", EVIL), id="no such GPU"),
        pytest.param(("estimate", "gpt2", "--engine-option", f"{EVIL}=1"), id="no such option"),
        pytest.param((EVIL,), id="no such command"),
    ],
)
def test_control_characters_never_reach_the_terminal(
    run: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    quoted = json.dumps(EVIL)
    files = {
        "{model}": write(tmp_path / "model.yaml", {**LLAMA, "name": EVIL}),
        "{card}": write(tmp_path / "card.yaml", f'{{"name": {quoted}, "memory_gib": 40}}'),
        "{bad}": write(tmp_path / "bad.json", {**LLAMA, EVIL: 1, "num_hidden_layers": EVIL}),
    }  # fmt: skip
    outcome = run(*(files.get(word, word) for word in arguments))
    assert outcome.exit_code in (0, 2, 3, 4)
    printed = outcome.stdout + outcome.stderr
    assert "evil" in printed or arguments[1:] == ("{bad}",)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed)


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_no_cell_of_a_csv_is_a_formula(run: Run, tmp_path: Path, start: str) -> None:
    name = f'{start}HYPERLINK("http://example.com")'
    model = write(tmp_path / "model.yaml", json.dumps({**LLAMA, "name": name}))
    lines = run("estimate", model, "--format", "csv").stdout.splitlines()
    assert lines[1].startswith(f"\"'{start}HYPERLINK")


# -- files that are written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("explain", "gpt2", "--gpu", "h100"), "--report"),
        (
            ("estimate", "gpt2", "--gpu", "h100", "--engine", "ddp", "--emit", "training-args"),
            "--output",
        ),
        (("plan", "gpt2", "--gpu", "h100", "--engine", "fsdp", "--emit", "accelerate"), "--output"),
    ],
    ids=["explain", "estimate", "plan"],
)
def test_a_null_byte_in_output_is_one_line(
    run: Run, arguments: tuple[str, ...], option: str
) -> None:
    outcome = run(*arguments, option, "a\0b.html")
    assert outcome.exit_code in (2, 3)
    assert outcome.stderr.splitlines()[-1].startswith("memplan: error: ")
    assert option in outcome.stderr
    assert "embedded null byte" in outcome.stderr


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    path.chmod(0o640)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(InputError, match="cannot be written: No space left"):
            write_file(path, "after", option="--output")
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
    assert path.read_text() == "before"
    write_file(path, "after", option="--output")
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 or os.name == "nt"


@pytest.mark.skipif(os.name == "nt", reason="about links and pipes")
def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    write_file(link, "after", option="--output")
    assert (target.read_text(), link.is_symlink()) == ("after", True)
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="cannot be written"):  # nobody reads it
        write_file(pipe, "text", option="--output")
    write_file(Path(os.devnull), "text", option="--output")
    with pytest.raises(InputError, match="cannot be written"):
        write_file(tmp_path, "text", option="--output")


# -- what is read ----------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"text_config": value}
    return value


def test_a_config_that_holds_itself_is_refused() -> None:
    config: dict[str, Any] = dict(LLAMA)
    config["text_config"] = config["vision_config"] = config["list"] = [config, config]
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        memplan.load_model(config)


@pytest.mark.parametrize("levels", [150, 5000, 100_000])
def test_a_deep_config_is_refused(run: Run, tmp_path: Path, levels: int) -> None:
    text = '{"model_type": "llama", "a": ' + "[" * levels + "]" * levels + "}"
    outcome = run("models", write(tmp_path / "config.json", text))
    assert outcome.exit_code == 3
    assert "nested more than 100 levels deep" in outcome.stderr
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        memplan.load_model({**LLAMA, **nested(min(levels, 5000))})


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        pytest.param('"rope_scaling": {"factor": 1e400}', "", id="nested infinity"),
        pytest.param('"rope_scaling": {"factor": NaN}', "", id="nested NaN"),
        pytest.param('"hidden_size": 1e308', "hidden_size", id="1e308"),
        pytest.param('"hidden_size": Infinity', "hidden_size", id="infinity"),
        pytest.param('"attention_dropout": 1e308', "attention_dropout", id="a rate of 1e308"),
        pytest.param('"text_config": {"hidden_size": NaN}', "", id="NaN in a part"),
        pytest.param(f'"hidden_size": 1{"0" * 400}', "hidden_size", id="400 digits"),
        pytest.param(f'"x": [{{"y": 1{"0" * 400}}}]', "x.y", id="400 digits inside"),
    ],
)
def test_numbers_that_are_none(run: Run, tmp_path: Path, changes: str, place: str) -> None:
    kept = {key: value for key, value in LLAMA.items() if f'"{key}"' not in changes}
    text = f"{json.dumps(kept)[:-1]}, {changes}}}"
    outcome = run("estimate", write(tmp_path / "config.json", text))
    assert outcome.exit_code in (0, 3)
    if place:
        assert outcome.exit_code == 3
        assert re.search(rf"config\.json: '?{place}'?", outcome.stderr)
    assert len(outcome.stderr) < 500


def test_a_multiplier_of_zero_is_refused() -> None:
    config = {"model_type": "lfm2", "block_ffn_dim_multiplier": 0, "block_auto_adjust_ff_dim": True}
    with pytest.raises(ConfigError, match="too small"):
        memplan.estimate(memplan.load_model(config), gpu="h100")


YAML_FILES = {
    "--setup": "on: {0}\nnum_gpus: 8",
    "--training-args": "on: {0}\noutput_dir: x",
    "--accelerate-config": "on: {0}\ndistributed_type: FSDP",
}


@pytest.mark.parametrize("option", YAML_FILES)
@pytest.mark.parametrize("value", ["1", "[1]", "{off: 1}"])
def test_keys_that_are_no_text(run: Run, tmp_path: Path, option: str, value: str) -> None:
    path = write(tmp_path / "file.yaml", YAML_FILES[option].format(value))
    outcome = run("estimate", "gpt2", "--gpus", "8", option, path)
    assert outcome.exit_code == 3
    assert "file.yaml: the key True is not text: put it in quotes" in outcome.stderr


def test_a_nested_key_that_is_no_text_is_named_with_its_place(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "setup.yaml", "num_gpus: 8\nengine_options:\n  on: 1\n")
    outcome = run("estimate", "gpt2", "--setup", path)
    assert outcome.exit_code == 3
    assert "setup.yaml: engine_options: the key True is not text" in outcome.stderr


OPTIONS: list[Any] = [
    [1, 2],
    {"a": 1},
    [[]],
    {"a": {"b": [1]}},
    1e308,
    float("inf"),
    float("nan"),
    2**70,
]


@pytest.mark.parametrize("value", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("deepspeed", "reduce_bucket_size"), ("deepspeed", "overlap_comm"),
        ("deepspeed", "leaf_module"), ("fsdp", "reshard_after_forward"), ("fsdp1", "autocast"),
        ("ddp", "bucket_cap_mb"), ("ddp", "gradient_as_bucket_view"), ("fsdp", "no_such"),
    ],
)  # fmt: skip
def test_engine_options_of_a_wrong_kind(engine: str, name: str, value: object) -> None:
    try:
        setup = memplan.TrainingSetup(num_gpus=8, engine=engine, engine_options={name: value})  # type: ignore[arg-type]
        memplan.estimate(memplan.load_model("gpt2"), setup, gpu="h100")
    except SetupError as error:
        assert name in str(error)


@pytest.mark.parametrize("options", [[1], "ab", {1: 2}, {True: 1}, [("a",)], 5])
def test_engine_options_that_are_no_mapping(options: Any) -> None:
    with pytest.raises(SetupError, match="engine_options: "):
        memplan.TrainingSetup(engine_options=options)


@pytest.mark.parametrize(
    ("axes", "place"),
    [
        pytest.param({"micro_batch_size": [None]}, "micro_batch_size", id="nothing"),
        pytest.param({"micro_batch_size": [[1]]}, "micro_batch_size", id="a list in a list"),
        pytest.param({"micro_batch_size": [{"a": 1}]}, "micro_batch_size", id="a mapping"),
        pytest.param({"seq_len": [1e308]}, "seq_len", id="1e308"),
        pytest.param({"engine_options": [{"a": [1]}]}, "axes.engine_options", id="options"),
        pytest.param({"engine_options": [7]}, "engine_options", id="a number for options"),
    ],
)
def test_axes_of_a_wrong_kind(run: Run, tmp_path: Path, axes: object, place: str) -> None:
    sweep = {"version": 1, "model": "gpt2", "axes": axes}
    outcome = run("sweep", write(tmp_path / "sweep.yaml", sweep))
    assert outcome.exit_code == 3
    assert place in outcome.stderr


ROW = {"task": "causal-lm", "gpu": "h100", "num_params": 1, "peak_bytes": 1, "verdict": "fits"}
DOCUMENT = {"schema_version": 1, "memplan_version": "0", "model_fingerprint": "0", "rows": [ROW]}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rows": 1}, "rows: "), ({"rows": [1]}, "rows[0]: "), ({"rows": [[]]}, "rows[0]: "),
        ({"rows": [{**ROW, "peak_bytes": "1"}]}, "rows[0].peak_bytes: "),
        ({"rows": [{**ROW, "peak_bytes": True}]}, "rows[0].peak_bytes: "),
        ({"rows": [{**ROW, "peak_bytes": -1}]}, "rows[0].peak_bytes: "),
        ({"rows": [{**ROW, "peak_bytes": 10**30}]}, "rows[0].peak_bytes: "),
        ({"rows": [ROW, {**ROW, "gpu": ["h100"]}]}, "rows[1].gpu: "),
        ({"rows": [{**ROW, "checkpointing": {}}]}, "rows[0].checkpointing: "),
        ({"rows": [{**ROW, "verdict": "good"}]}, "rows[0].verdict: "),
        ({"rows": [{**ROW, "verdict": []}]}, "rows[0].verdict: "),
        ({"schema_version": "1"}, "schema_version: "), ({"memplan_version": 1}, "memplan_version: "),
        ({"model_fingerprint": None}, "model_fingerprint: is missing"),
    ],
    ids=str,
)  # fmt: skip
def test_a_baseline_of_a_wrong_form(
    run: Run, tmp_path: Path, changes: dict[str, object], place: str
) -> None:
    path = write(tmp_path / "old.json", {**DOCUMENT, **changes})
    outcome = run("estimate", "gpt2", "--baseline", path)
    assert (outcome.exit_code, outcome.stdout) == (3, "")
    assert f"old.json: {place}" in outcome.stderr


# -- sizes -----------------------------------------------------------------------------------------


def test_ten_thousand_layers_are_refused_with_the_limit(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", {**LLAMA, "num_hidden_layers": 10_000})
    start = time.monotonic()
    outcome = run("estimate", path, "--gpus", "8")
    assert time.monotonic() - start < 5
    assert outcome.exit_code == 3
    assert f"num_hidden_layers: must be from 1 to {MAX_LAYERS}, got 10000" in outcome.stderr


def test_as_many_layers_as_are_laid_out_take_no_time(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", {**LLAMA, "num_hidden_layers": MAX_LAYERS})
    asked = (
        "--engine",
        "deepspeed",
        "--zero",
        "3",
        "--offload",
        "none",
        "--gpus",
        "8",
        "--gpu",
        "h100",
    )
    start = time.process_time()  # other processes' work is none of it
    assert run("estimate", path, *asked).exit_code == 0
    assert time.process_time() - start < 12


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "gpt2", "--gpus", "1-999999", "--batch-size", "1-999999"),
        ("sweep", "gpt2", "--batch-size", "1..1000000000000"),
        ("estimate", "gpt2", "--gpus", "1000000000"),
        ("estimate", "gpt2", "--batch-size", "2147483648", "--seq-len", "2147483648"),
        ("estimate", "gpt2", "--freeze", "layers.0-99999999999"),
    ],
    ids=" ".join,
)
def test_products_of_sizes_are_bounded(run: Run, arguments: tuple[str, ...]) -> None:
    start = time.monotonic()
    outcome = run(*arguments)
    assert time.monotonic() - start < 20
    assert outcome.exit_code in (0, 2, 3)


@pytest.mark.parametrize("value", ["x" * 100_000, "x " * 100_000, "9" * 4000])
def test_messages_name_file_and_key_and_stay_short(run: Run, tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "setup.yaml", {"num_gpus": 8, "engine": value})
    outcome = run("estimate", "gpt2", "--setup", path)
    assert outcome.exit_code == 3
    assert f"{path}: engine: " in outcome.stderr
    assert len(outcome.stderr) < len(path) + 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_gpus", [8]), ("num_gpus", {"a": 1}), ("micro_batch_size", None), ("num_gpus", None),
        ("engine_options", [{"a": {"b": [1]}}]), ("dropout", ["x"]), ("dropout", "x"), ("freeze", 5),
        ("optimizer", [[]]), ("checkpointing", [{}]), ("seq_len", [float("nan")]),
    ],
    ids=str,
)  # fmt: skip
def test_axes_of_a_wrong_kind_in_python(name: str, value: object) -> None:
    with pytest.raises(SetupError, match=name):
        list(memplan.sweep(memplan.load_model("gpt2"), {name: [value]}, gpus=["h100"]))
