"""Plug-ins: a package of one of each kind, installed; and what others' mistakes come to."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

import memplan
from memplan.sources import plugins
from memplan.training.optimizers import Optimizer
from tests.conftest import Outcome

Run = Callable[..., Outcome]
OWN = Path(__file__).parents[1] / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as pip installs it."""
    source = tmp_path_factory.mktemp("source") / "plugin"
    copytree(OWN, source)
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "--target", str(target), str(source)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture
def acme(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is there, and nothing of it is afterwards."""
    monkeypatch.syspath_prepend(str(installed))
    forget()
    yield
    monkeypatch.undo()
    forget()
    for name in ("acme", "acme_broken", "acme_old"):
        sys.modules.pop(name, None)


def forget() -> None:
    invalidate_caches()
    for each in (plugins._entries, plugins._loaded, plugins._tell):
        each.cache_clear()
    Optimizer._value2member_map_.pop("acme-sgd", None)


@pytest.mark.usefixtures("acme")
def test_one_of_each_kind(run: Run, tmp_path: Path) -> None:
    asked = ("estimate", "acme-1b", "--gpu", "acme-9000", "--seq-len", "128", "--format", "json")
    document = json.loads(run(*asked).stdout)
    (row,) = document["rows"]
    assert row["num_params"] == memplan.load_model("acme-1b").num_params
    card = memplan.load_gpu("acme-9000")
    assert (row["gpu"], card.capacity_bytes) == ("acme-9000", 96 * 2**30)
    # An engine stands for options, and what is typed goes before them.
    found = memplan.estimate("acme-1b", gpus=8, engine="acme-fsdp", gpu="h100")
    assert (found.setup.engine.value, found.setup.fsdp_strategy.value) == ("fsdp", "shard_grad_op")  # type: ignore[union-attr]
    words = ("--gpus", "8", "--engine", "acme-fsdp", "--checkpointing", "none")
    (row,) = json.loads(run(*asked, *words).stdout)["rows"]
    assert (row["fsdp_strategy"], row["checkpointing"]) == ("shard_grad_op", "none")
    swept = run(
        "sweep",
        "acme-1b",
        "--gpus",
        "8",
        "--engine",
        "acme-fsdp",
        "--seq-len",
        "128",
        "--format",
        "json",
    )
    assert json.loads(swept.stdout)["rows"][0]["fsdp_strategy"] == "shard_grad_op"
    # The optimizer keeps one state in fp32; so does momentum.
    own, like = (
        memplan.estimate("acme-1b", optimizer=name, seq_len=128)
        for name in ("acme-sgd", "sgd-momentum")
    )
    assert own.held_bytes == like.held_bytes
    assert Optimizer("acme-sgd") not in list(Optimizer)
    fused = memplan.estimate("acme-1b", kernels="acme-fused", gpu="h100")
    assert (
        fused.peak_bytes
        == memplan.estimate("acme-1b", attention="flash", norm="fused", gpu="h100").peak_bytes
    )
    file = tmp_path / "run.yaml"
    file.write_text("acme_version: 3\ngpus: 4\n")
    (row,) = json.loads(
        run("estimate", "--setup", str(file), "--gpu", "h100", "--format", "json").stdout
    )["rows"]
    assert (row["num_gpus"], row["micro_batch_size"]) == (4, 2)
    written = run(
        "estimate",
        "acme-1b",
        "--gpus",
        "2",
        "--engine",
        "ddp",
        "--gpu",
        "h100",
        "--emit",
        "acme-launch",
    )
    assert written.stdout == "acme launch acme-1b --gpus 2\n"


def failing_writer(setup: object, model: object) -> str:
    return str((setup, model) and 1 // 0)


BROKEN = {
    "acme-none": "TypeError: a mapping is wanted, not None",
    "acme-late": "RuntimeError: no licence was found",
    "acme-older": "it is written for interface 0 of plug-ins, and this memplan has 1",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.usefixtures("acme")
def test_one_that_fails_is_a_line_and_left_out(run: Run, name: str) -> None:
    outcome = run("estimate", name)
    assert outcome.exit_code in (3, 4)
    told, error = outcome.stderr.splitlines()
    assert (
        told == f"memplan: plug-in models: {name} of acme-memplan 1.2 is left out: {BROKEN[name]}"
    )
    assert error.startswith("memplan: error: ")
    plugins._tell.cache_clear()
    with pytest.warns(UserWarning, match="is left out"), pytest.raises(memplan.MemplanError):
        memplan.load_model(name)
    # Others of the package are there.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memplan.load_model("acme-1b").num_layers == 16


@pytest.mark.usefixtures("acme")
def test_a_reader_and_a_writer_that_raise(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("acme_version: 3\n")  # it asks for `gpus`
    outcome = run("estimate", "--setup", str(file))
    assert (outcome.exit_code, outcome.stderr) == (3, f"memplan: error: {file}: KeyError: 'gpus'\n")

    import acme  # type: ignore[import-not-found]

    acme.write.__code__ = failing_writer.__code__
    outcome = run("estimate", "gpt2", "--engine", "ddp", "--gpu", "t4", "--emit", "acme-launch")
    assert outcome.exit_code == 3
    assert "--emit acme-launch: ZeroDivisionError" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.usefixtures("acme")
def test_doctor_says_what_came_from_where(run: Run) -> None:
    found = json.loads(run("doctor", "--format", "json").stdout)["plugins"]
    troubles = {each["name"]: each["trouble"] for each in found}
    assert {each["package"] for each in found} == {"acme-memplan 1.2"}
    assert {name for name, trouble in troubles.items() if trouble is None} == {
        "models: acme-1b", "gpus: acme-9000", "engines: acme-fsdp", "optimizers: acme-sgd", "kernels: acme-fused",
        "readers: acme", "writers: acme-launch",
    }  # fmt: skip
    assert all(troubles[f"models: {name}"] == trouble for name, trouble in BROKEN.items())
    assert "write a number above" in troubles["gpus: acme-negative"]
    assert "left out: RuntimeError: no licence was found" in " ".join(run("doctor").stdout.split())


def test_no_command_looks_for_plug_ins_that_does_not_need_one() -> None:
    """Starting up takes what it took: neither entry points nor a configuration are read."""
    script = "import sys; from memplan.cli.app import run; code = run(sys.argv[1:]); print(code, 'importlib.metadata' in sys.modules, 'memplan.sources.plugins' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "estimate", "gpt2", "--gpu", "t4", "--format", "csv"],
        capture_output=True, text=True, check=True, cwd=OWN.parents[1],
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 False False"


# -- configuration -------------------------------------------------------------------------------------------


@pytest.fixture
def organisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    (folder / "gpus").mkdir(parents=True)
    (folder / "pools").mkdir()
    (folder / "gpus" / "slice.yaml").write_text("memory_gib: 30\nvendor: NVIDIA\n")
    (folder / "prices.yaml").write_text("h100: 2.5\nt4: 0.2\n")
    (folder / "pools.yaml").write_text("pools: [{name: usual, gpu: t4, count: 4}]\n")
    (folder / "pools" / "big.yaml").write_text("pools: [{name: large, gpu: slice, count: 4}]\n")
    (folder / "defaults.yaml").write_text("gpu: t4\ncpu-memory: 64GiB\n")
    monkeypatch.setenv("MEMPLAN_CONFIG", str(folder))
    return folder


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.exit_code == 0, outcome.stderr
    found: list[dict[str, Any]] = json.loads(outcome.stdout)["rows"]
    return found


@pytest.mark.usefixtures("organisation")
def test_cards_prices_pools_and_defaults(run: Run, tmp_path: Path) -> None:
    asked = ("estimate", "gpt2", "--seq-len", "128", "--format", "json")
    assert [row["gpu"] for row in rows(run(*asked))] == ["t4-16gb"]
    assert rows(run(*asked))[0]["node_memory_bytes"] == 64 * 2**30
    assert [row["gpu"] for row in rows(run(*asked, "--gpu", "slice"))] == ["slice"]
    assert [row["gpu"] for row in rows(run(*asked, "--gpu-memory", "46GiB"))] == ["custom-46gib"]
    (priced,) = rows(run(*asked, "--tokens", "1B"))
    assert priced["cost"] is not None
    assert "cost" not in rows(run(*asked))[0]
    request = tmp_path / "request.yaml"
    request.write_text("model: gpt2\n")
    assert run("admit", str(request)).stdout.startswith("Admitted to usual\n")
    assert run("admit", str(request), "--pools", "big").stdout.startswith("Admitted to large\n")
    # Python's own questions are what is said there alone.
    assert memplan.estimate("gpt2", seq_len=128).gpu is None


def test_an_earlier_folder_goes_first_and_doctor_says_so(
    organisation: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    (first / "gpus").mkdir(parents=True)
    (first / "gpus" / "slice.yaml").write_text("memory_gib: 10\n")
    (first / "gpus" / "odd.yaml").write_text("memory_gib: much\n")
    (first / "defaults.yaml").write_text("gpu: slice\n")
    monkeypatch.setenv("MEMPLAN_CONFIG", f"{first}:{organisation}")
    assert memplan.load_gpu("slice").capacity_bytes == 10 * 2**30
    found = json.loads(run("doctor", "--format", "json").stdout)["configuration"]
    assert found[str(first / "gpus" / "slice.yaml")] == "card slice"
    assert (
        found[str(organisation / "gpus" / "slice.yaml")]
        == "card slice, hidden by an earlier folder's"
    )
    assert "cannot be used: " in found[str(first / "gpus" / "odd.yaml")]
    assert found[str(first / "defaults.yaml")] == "defaults: --gpu slice"
    monkeypatch.delenv("MEMPLAN_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "memplan").symlink_to(organisation)
    assert memplan.load_gpu("slice").capacity_bytes == 30 * 2**30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus: 8", "has no default. Did you mean 'gpu'?"),
        ("seq_len: 8", "'seq_len' has no default. Options that may have one"),
        ("gpu: [t4]", "gpu: write a text or a number"),
        ("gpu", "must hold keys and values"),
        ("gpu: t4\ngpu: t4", "is given twice"),
        ("gpu: no-such-card", "no-such-card"),
    ],
)
def test_defaults_that_are_none(organisation: Path, run: Run, text: str, said: str) -> None:
    (organisation / "defaults.yaml").write_text(text)
    outcome = run("estimate", "gpt2")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (3, 1)
    assert said in outcome.stderr
    assert run("estimate", "--help").exit_code == 0, "help is there whatever the configuration says"
