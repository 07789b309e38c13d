"""Whatever file a user hands over: an answer, or one line that names it; never a traceback, never a wait."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.errors import ExitCode, MemplanError
from memplan.sources.lengths_file import MAX_LENGTHS_BYTES

Run = Callable[..., Any]

DEEP = "[" * 100_000
TAPES = ("gpt2", "llama", "t5")


def hostile(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files that are none of what is asked for, by what is wrong with them."""
    for name, content in {
        "nested": DEEP.encode(),
        "nested in a key": b'{"length": ' + DEEP.encode(),
        "of another encoding": b"\xff\xfe1\n2\n",
        "of digits": b"9" * 100_000,
        "empty": b"",
        "a list": b"[1, 2]",
        "cut off": b'{"length": 1',
        "with a zero byte": b"12\n\x00\n",
    }.items():
        path = folder / f"{name}.json"
        path.write_bytes(content)
        yield name, path
    large = folder / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_LENGTHS_BYTES + 1)  # it takes no room
    yield "too large", large
    yield "a folder", folder
    yield "no file", folder / "none.json"
    yield "too long a name", folder / ("a" * 5000)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
        yield "a pipe that nobody writes to", folder / "pipe"
        yield "a device without an end", Path("/dev/zero")


READERS = {
    "--lengths": ("estimate", "gpt2", "--lengths"),
    "--price": ("estimate", "gpt2", "--gpu", "t4", "--tokens", "1M", "--price"),
    "--setup": ("estimate", "gpt2", "--setup"),
    "--training-args": ("estimate", "gpt2", "--training-args"),
    "--deepspeed": ("estimate", "gpt2", "--deepspeed"),
    "--gpu": ("estimate", "gpt2", "--gpu"),
    "--baseline": ("sweep", "gpt2", "--gpus", "1", "--baseline"),
    "MODEL": ("estimate",),
    "--against": ("explain", "gpt2", "--against"),
}


@pytest.mark.parametrize("command", READERS.values(), ids=list(READERS))
def test_a_file_that_is_none_is_one_line(run: Run, tmp_path: Path, command: tuple[str, ...]):
    for name, path in hostile(tmp_path):
        answer = run(*command, str(path))
        # A name without a file may be one of the hub's, or another way to say what is asked for.
        assert answer.exit_code in (ExitCode.USAGE, ExitCode.INPUT, ExitCode.HUB), name
        assert answer.stderr.count("\n") == 1, name
        assert answer.stderr.startswith("memplan: error: "), name
        assert len(answer.stderr) < 1000, name


def test_lengths_of_a_file_are_whole_numbers(run: Run, tmp_path: Path):
    path = tmp_path / "lengths.jsonl"
    for line in ('{"length": true}', '{"length": -1}', "99999999999999999999", '{"length": 1e3}'):
        path.write_text(f"12\n{line}\n")
        answer = run("estimate", "gpt2", "--lengths", str(path))
        assert answer.exit_code == ExitCode.INPUT
        assert f"{path}:2: expected a length" in answer.stderr


def places(found: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))


WRONG = (-1, 0, 2, 10**9, 10**40, 1.5, float("-inf"), "x", None, True, [], {}, [[]])


@pytest.mark.parametrize("name", TAPES)
def test_a_tape_with_one_wrong_value_is_read_or_refused(checkout: Path, tmp_path: Path, name: str):
    whole = json.loads((checkout / f"tests/data/traced/{name}.tape.json").read_text())
    draw, found = random.Random(name), list(places(whole))
    path = tmp_path / "broken.tape.json"
    refused = 0
    for _ in range(25):
        *before, last = draw.choice(found)
        part: Any = whole
        for key in before:
            part = part[key]
        right, part[last] = part[last], draw.choice(WRONG)
        path.write_text(json.dumps(whole))
        part[last] = right
        try:
            estimate = memplan.estimate(
                memplan.load_model(path), memplan.TrainingSetup(seq_len=32), gpu=None
            )
            assert estimate.peak_bytes > 0
        except MemplanError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 5


def test_a_call_that_lacks_what_it_takes_is_refused(checkout: Path, tmp_path: Path):
    tape = json.loads((checkout / "tests/data/traced/gpt2.tape.json").read_text())
    for program in tape["programs"].values():
        for step in program["steps"]:
            if step[1].endswith("functional.dropout"):
                step[4] = [["p", []], ["training", True]]
    path = tmp_path / "broken.tape.json"
    path.write_text(json.dumps(tape))
    model = memplan.load_model(path)
    with pytest.raises(memplan.errors.TraceError, match="do not fit together"):
        _ = memplan.estimate(model, memplan.TrainingSetup(seq_len=32)).peak_bytes


HOSTILE_NAME = "a|b<img src=x onerror=alert(1)>_[x](y)`c`*"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip
ONE_GPU = ("--gpus", "1", "--gpu", "t4")
ONE_SETUP = (*ONE_GPU, "--engine", "ddp", "--global-batch-size", "8")
"""A name is written the same way whatever it is the name of: one setup is enough."""
ANSWERS = {"estimate": ("--gpu", "t4"), "sweep": ONE_GPU, "plan": ONE_SETUP, "models": ()}


@pytest.mark.skipif(os.name == "nt", reason="a name that Windows does not allow")
def test_a_name_is_text_in_markdown_and_html(run: Run, tmp_path: Path):
    path = tmp_path / f"{HOSTILE_NAME}.json"
    path.write_text(json.dumps(CONFIG))
    for command, options in ANSWERS.items():
        answer = run(command, str(path), *options, "--format", "markdown")
        assert answer.exit_code == ExitCode.OK, answer.stderr
        assert "<img" not in answer.stdout, command
        assert "](y)" not in answer.stdout.replace("\\]", ""), command
        rows = [line for line in answer.stdout.splitlines() if line.startswith("|")]
        widths = {line.replace("\\|", "").count("|") for line in rows[:3]}
        assert len(widths) == 1, command
    pages = {"explain": ("--gpu", "t4"), "plan": ONE_SETUP}
    for command, options in pages.items():
        for suffix in (".html", ".svg"):
            page = tmp_path / f"{command}{suffix}"
            answer = run(command, str(path), *options, "--report", str(page))
            assert answer.exit_code == ExitCode.OK, answer.stderr
            assert "<img" not in page.read_text()
