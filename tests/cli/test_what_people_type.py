"""What people type, as they type it: short forms, lists, addresses, names of other tools."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ModelNotFoundError, UsageError
from memplan.sources.about_models.hub_url import read_hub_url
from memplan.sources.about_models.registry import builtin_names
from memplan.units import parse_bytes

pytestmark = pytest.mark.long

SMALL = ("estimate", "gpt2", "--format", "json")


def rows(run: Any, *arguments: str) -> list[dict[str, Any]]:
    outcome = run(*arguments)
    assert outcome.exit_code == 0, outcome.stderr
    found: list[dict[str, Any]] = json.loads(outcome.stdout)["rows"]
    return found


def test_8k_tokens(run: Any) -> None:
    assert rows(run, *SMALL, "--seq-len", "1k")[0]["seq_len"] == 1024
    swept = rows(run, "sweep", "gpt2", "--seq-len", "256..1k", "--format", "json", "--gpu", "t4")
    assert [row["seq_len"] for row in swept] == [256, 512, 1024]
    assert "such as 8192 or 8k" in run(*SMALL, "--seq-len", "8x").stderr


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80G", 80 * 2**30), ("80g", 80 * 2**30), ("80GB", 80 * 10**9)]
)
def test_80g_is_what_slurm_means(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("option", ["--gpu-memory", "--gpu"])
def test_gb_is_said_to_be_no_gib(run: Any, option: str) -> None:
    outcome = run(*SMALL, option, "80GB")
    assert outcome.exit_code == 0
    assert "80GB is 80 x 10^9 bytes = 74.5 GiB" in outcome.stderr
    assert run(*SMALL, option, "80G").stderr == ""


@pytest.mark.parametrize("command", ["estimate", "sweep", "plan"])
def test_gpus_in_a_list(run: Any, command: str) -> None:
    found = rows(run, command, "gpt2", "--format", "json", "--gpu", "t4, a100")
    assert {row["gpu"] for row in found} == {"t4-16gb", "a100-sxm4-80gb"}


def test_engines_in_a_list_and_fsdp2(run: Any) -> None:
    found = rows(run, *SMALL, "--gpus", "8", "--engine", "fsdp2,deepspeed", "--zero", "3")
    assert {(row["engine"], row["zero_stage"]) for row in found} == {
        ("fsdp", None), ("deepspeed", 3),
    }  # fmt: skip


def test_global_batch_of_an_estimate(run: Any) -> None:
    command = (*SMALL, "--gpus", "8", "--engine", "ddp", "--global-batch-size", "64")
    row = rows(run, *command, "--batch-size", "2")[0]
    assert row["gradient_accumulation_steps"] == 4
    refused = run(*command, "--gradient-accumulation", "2")
    assert refused.exit_code == 2
    assert "--gradient-accumulation, which follows from it" in refused.stderr
    assert run(*command, "--batch-size", "3").exit_code == 3


@pytest.mark.parametrize("command", ["estimate", "sweep", "plan", "explain"])
def test_a_number_of_gpus_under_the_wrong_name(run: Any, command: str) -> None:
    outcome = run(command, "gpt2", "--gpu", "8")
    assert outcome.exit_code == 3
    assert "if it is how many there are, say so: --gpus 8" in outcome.stderr


@pytest.mark.parametrize("command", ["estimate", "sweep", "plan", "explain"])
def test_megatron_is_an_engine(run: Any, command: str) -> None:
    engines = run(command, "--help", "all").stdout.partition("--engine ")[2].partition("--")[0]
    assert "megatron" in engines
    refused = run(command, "gpt2", "--engine", "megatrn")
    assert refused.exit_code == 3
    assert "Did you mean 'megatron'?" in refused.stderr


def test_megatron_takes_its_own_options(run: Any) -> None:
    command = (*SMALL, "--gpus", "4", "--engine", "megatron", "--tp", "2", "--sequence-parallel")
    held = [
        rows(run, *command, "--engine-option", f"use_distributed_optimizer={chosen}")[0][
            "held_bytes"
        ]
        for chosen in ("true", "false")
    ]
    assert held[0] < held[1]
    refused = run(*command, "--engine-option", "transformer_impl=te")
    assert refused.exit_code == 3
    assert "'te' is not one of local, transformer_engine" in refused.stderr


# -- the hub's pages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "repo_id", "revision"),
    [
        ("https://huggingface.co/google-t5/t5-3b", "google-t5/t5-3b", None),
        ("http://huggingface.co/google-t5/t5-3b/", "google-t5/t5-3b", None),
        ("huggingface.co/gpt2", "gpt2", None),
        ("https://huggingface.co/a/b/tree/main", "a/b", None),
        ("https://huggingface.co/a/b/tree/main/folder", "a/b", None),
        ("https://huggingface.co/a/b/blob/v2/config.json?x=1#L3", "a/b", "v2"),
        ("https://hf.co/a/b/resolve/refs%2Fpr%2F7/config.json", "a/b", "refs/pr/7"),
        ("https://huggingface.co/gpt2/tree/v1", "gpt2", "v1"),
    ],
)
def test_a_page_is_read(url: str, repo_id: str, revision: str | None) -> None:
    page = read_hub_url(url)
    assert (page.repo_id, page.revision) == (repo_id, revision)


@pytest.mark.parametrize(
    "url",
    ["https://huggingface.co/", "https://huggingface.co/datasets/a/b", "https://example.org/a/b"],
)
def test_another_page_is_refused(url: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is no page of a model on huggingface\.co"):
        read_hub_url(url)


def test_a_page_and_a_revision_that_disagree() -> None:
    with pytest.raises(UsageError, match="names 'v2', and 'v1' is given beside it"):
        read_hub_url("https://huggingface.co/a/b/tree/v2", revision="v1")


def test_a_pasted_page_is_a_builtin_model(run: Any) -> None:
    outcome = run("models", "https://huggingface.co/openai-community/gpt2/tree/main")
    assert outcome.stdout.startswith("gpt2: ")


# -- a filter for models ---------------------------------------------------------------------------


def test_models_holding_a_word(run: Any) -> None:
    found = rows(run, "models", "qwen3", "--format", "json")
    names = [row["name"] for row in found]
    assert set(names) == {name for name in builtin_names() if name in names}
    assert any(name.startswith("qwen3-") for name in names)
    assert all("qwen3" in f"{row['name']} {row['family']} {row['hub_id']}".lower() for row in found)
    sizes = {row["name"]: row["total_params"] for row in found}
    assert sizes["qwen3-0.6b"] == 596_049_920
    assert "596.05M" in run("models", "qwen3").stdout


def test_a_name_is_no_filter(run: Any) -> None:
    assert run("models", "gpt2").stdout.startswith("gpt2: ")
    assert run("models", "nothing-like-this").exit_code in (3, 4)


# -- plans -----------------------------------------------------------------------------------------

PLAN = ("plan", "llama-3.2-1b", "--gpus", "2", "--gpu", "a100", "--format", "json")


def test_a_plan_of_some_stages(run: Any) -> None:
    assert {row["zero_stage"] for row in rows(run, *PLAN, "--zero", "0,3")} == {0, 3}
    both = rows(run, *PLAN, "--zero", "3", "--engine", "ddp,deepspeed", "--limit", "50")
    assert {row["zero_stage"] for row in both} == {None, 3}
    refused = run(*PLAN, "--zero", "3", "--engine", "fsdp")
    assert refused.exit_code == 3
    assert "only deepspeed has ZeRO stages, and the engines are fsdp" in refused.stderr


def test_the_longest_sequence(run: Any) -> None:
    found = rows(run, *PLAN, "--maximize", "seq-len", "--engine", "ddp", "--batch-size", "2")
    assert len(found) == 7  # three with Liger's kernels beside the four without
    assert all(row["seq_len"] % 128 == 0 and row["micro_batch_size"] == 2 for row in found)
    by_tier = [row["seq_len"] for row in found if row["precision"] == found[0]["precision"]]
    assert by_tier == sorted(by_tier, reverse=True)
    for row in found:
        same = (
            "estimate", "llama-3.2-1b", "--gpus", "2", "--gpu", "a100", "--engine", "ddp",
            "--precision", row["precision"], "--checkpointing", row["checkpointing"],
            "--batch-size", "2", "--format", "json",
            *(("--kernels", "liger") if row["other_settings"] else ()),
        )  # fmt: skip
        assert rows(run, *same, "--seq-len", str(row["seq_len"]))[0]["verdict"] == "fits"


def test_the_most_layers(run: Any) -> None:
    """As many as a usual node's RAM has room for where states lie there, and no more."""
    card = ("plan", "llama-3.1-8b", "--gpus", "2", "--gpu", "a100-40gb", "--format", "json")
    found = rows(run, *card, "--maximize", "layers", "--zero", "3", "--checkpointing", "full")
    assert found[0]["num_layers"] > 32 > found[-1]["num_layers"]
    assert found[0]["num_params"] > 8_030_261_248
    assert found[0]["offload_optimizer"] == "cpu"
    node_bytes = 288 << 30
    assert 0.95 * node_bytes < found[0]["host_bytes"] <= node_bytes


def test_positions_end_a_sequence(run: Any) -> None:
    command = ("plan", "gpt2", "--gpus", "1", "--gpu", "a100", "--maximize", "seq-len")
    assert {row["seq_len"] for row in rows(run, *command, "--format", "json")} == {1024}


def test_the_largest_batch(run: Any) -> None:
    kept = (*PLAN, "--checkpointing", "none")
    assert rows(run, *kept, "--maximize", "batch") == rows(run, *kept, "--objective", "batch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--maximize", "seqlen"), "Did you mean 'seq-len'?"),
        (("--maximize", "batch", "--objective", "gpus"), "makes no use of --objective"),
        (("--maximize", "seq-len", "--seq-len", "4k"), "makes no use of --seq-len"),
        (("--batch-size", "2"), "means nothing without --maximize seq-len or layers"),
    ],
)
def test_a_plan_that_makes_no_sense(run: Any, arguments: tuple[str, ...], message: str) -> None:
    outcome = run(*PLAN, *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


# -- completion ------------------------------------------------------------------------------------


def completed(words: str, checkout: Path, *, shell: str = "bash") -> list[str]:
    """What a shell is offered for the last of some words."""
    settings = {
        **os.environ, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": words, "_MEMPLAN_COMPLETE": f"complete_{shell}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "memplan"], cwd=checkout, env=settings, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_completion_of_commands_options_models_and_gpus(checkout: Path) -> None:
    assert completed("memplan est", checkout) == ["estimate"]
    assert "--engine" in completed("memplan plan t5-3b --en", checkout)
    assert completed("memplan estimate t5-3", checkout) == ["t5-3b"]
    assert completed("memplan sweep CHANGEL", checkout) == []
    assert "configs/models/" in completed("memplan estimate configs/mod", checkout)
    assert completed("memplan estimate t5-3b --gpu a100,gh200-9", checkout) == ["a100,gh200-96gb"]
    assert "h200" in completed("memplan gpus h2", checkout)
    assert any("t5-3b" in word for word in completed("memplan models t5-3", checkout, shell="zsh"))


def test_completion_loads_no_table(checkout: Path) -> None:
    code = (
        "import sys, os\n"
        "os.environ |= dict(COMP_WORDS='memplan estimate t5', COMP_CWORD='2',\n"
        "                   _MEMPLAN_COMPLETE='complete_bash')\n"
        "sys.argv = ['memplan']\n"
        "from memplan.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded', *sorted({'rich', 'yaml', 'huggingface_hub', 'memplan.graph.core.tape'}\n"
        "      & set(sys.modules)))"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded"
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_the_script_is_shown(run: Any, shell: str) -> None:
    outcome = run("--show-completion", shell)
    assert outcome.exit_code == 0
    assert "_MEMPLAN_COMPLETE" in outcome.stdout


def test_a_shell_that_is_not_known(run: Any) -> None:
    outcome = run("--show-completion", "tcsh")
    assert outcome.exit_code == 2
    assert "the shell 'tcsh' is not known: write one of bash, zsh" in outcome.stderr


def test_completion_is_installed(checkout: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "--install-completion", "bash"], cwd=checkout,
        env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("bash completes memplan from its next start on")
    assert ".bash_completions/memplan.sh" in (tmp_path / ".bashrc").read_text()
