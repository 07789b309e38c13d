"""Whether a job may start, and where: pools, the answer's schema, exit codes, and the hooks that ask."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import memplan
from memplan.hardware.pool import Pool
from memplan.search.admission import Confidence
from memplan.sources.outcomes import confidence_of
from memplan.sources.pools import pools_from, read_pools
from tests.conftest import Outcome

Run = Callable[..., Outcome]
CONFIGS = Path(__file__).parents[2] / "configs"
ADMISSION = CONFIGS / "admission"
SCHEMA = json.loads((ADMISSION / "schema.json").read_text())
PLATFORM = str(CONFIGS / "pools" / "platform.yaml")
SMALL = {"model": "gpt2", "gpus": 2, "engine": "ddp", "seq_len": 128}


def pools(*kinds: dict[str, Any]) -> tuple[Pool, ...]:
    listed = [
        {"name": f"pool-{number}", "gpu": "t4", "count": 8, **each}
        for number, each in enumerate(kinds)
    ]
    return pools_from({"pools": listed}, source="pools.yaml")


def admitted(request: dict[str, Any], *kinds: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The document of an admission, which is of its schema."""
    document = memplan.admit(request, pools(*kinds), **options).to_dict()
    jsonschema.validate(json.loads(json.dumps(document)), SCHEMA)
    return document


def test_the_cheapest_pool_that_fits() -> None:
    found = admitted(SMALL, {"price": 3.0}, {"price": 2.0}, {"price": 0.1, "gpu": "1GiB"}, {})
    assert (found["admitted"], found["verdict"], found["pool"]) == (True, "fits", "pool-1")
    assert [each["verdict"] for each in found["pools"]] == ["fits", "fits", "OOM", "fits"]
    answer = memplan.estimate("gpt2", gpus=2, engine="ddp", seq_len=128, gpu="t4")
    needs = found["needs"]
    assert (needs["gpu_low_bytes"], needs["gpu_high_bytes"]) == (
        answer.total_bytes.low,
        answer.total_bytes.high,
    )
    assert needs["time_s"] is None


def test_first_of_the_file_where_nothing_tells_them_apart() -> None:
    assert admitted(SMALL, {}, {})["pool"] == "pool-0"
    assert admitted({**SMALL, "pool": "pool-1"}, {}, {})["pool"] == "pool-1"
    assert admitted({**SMALL, "pool": "batch"}, {}, {"queue": "batch"})["pool"] == "pool-1"


@pytest.mark.parametrize(
    ("kind", "verdict", "reason"),
    [
        ({"count": 1}, "no pool", "pool-0: has 1 GPUs of the 2 that are asked for"),
        ({"quota": 1}, "no pool", "pool-0: lets a job have 1 of its GPUs, and 2 are asked for"),
        ({"gpu": "1GiB"}, "OOM", "pool-0: does not fit: needs "),
        ({"cpu_memory": "1MiB"}, "OOM", "of CPU RAM of each node, and one has 0.0 GiB"),
    ],
)
def test_not_admitted(kind: dict[str, Any], verdict: str, reason: str) -> None:
    found = admitted(SMALL, kind)
    assert (found["admitted"], found["verdict"], found["pool"]) == (False, verdict, None)
    assert reason in found["reason"]


def test_what_is_tight_is_let_in_unless_it_is_to_fail() -> None:
    answer = memplan.estimate("gpt2", gpus=2, engine="ddp", seq_len=128, gpu="t4")
    between = (answer.total_bytes.low + answer.total_bytes.high) // 2
    tight = {"gpu": f"{between // 2**20}MiB"}
    found = admitted(SMALL, tight)
    assert (found["admitted"], found["verdict"]) == (True, "tight")
    assert not admitted(SMALL, tight, fail_on="tight")["admitted"]
    assert admitted(SMALL, tight, {"price": 9.0})["pool"] == "pool-1", "what fits goes first"


def test_nodes_are_the_pool_s() -> None:
    found = admitted({**SMALL, "gpus": 4}, {"gpus_per_node": 2})
    assert found["needs"]["num_nodes"] == 2
    found = admitted({**SMALL, "gpus": 4, "nodes": 1}, {"gpus_per_node": 2})
    assert "has 2 GPUs in a node, and 4 are asked for" in found["reason"]


def test_confidence_is_what_the_accuracy_page_counts() -> None:
    figures = json.loads((CONFIGS.parent / "tests" / "data" / "accuracy.json").read_text())
    said = [
        rows["fits"]
        for name, rows in figures.items()
        if name.startswith("verdicts, ") and "fits" in rows
    ]
    kinds = ("one GPU", "ddp", "deepspeed", "fsdp", "fsdp1", "megatron")
    found = [confidence_of(kind) for kind in kinds]
    assert sum(each.num_fits for each in found) == sum(sum(each.values()) for each in said)
    assert sum(each.num_false for each in found) == sum(each["died"] for each in said)
    assert admitted(SMALL, {})["confidence"] == confidence_of("ddp").to_dict()


@pytest.mark.parametrize(
    ("fits", "false", "most"), [(0, 0, 1.0), (59, 0, 0.0495), (100, 3, 0.0757)]
)
def test_how_often_it_may_be_false(fits: int, false: int, most: float) -> None:
    """``scipy.stats.beta.ppf(0.95, false + 1, fits - false)``."""
    assert Confidence(kind="", num_fits=fits, num_false=false).most == pytest.approx(most, abs=3e-5)


# -- the command -----------------------------------------------------------------------------------------


def test_the_command(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    outcome = run("admit", str(file), "--pools", PLATFORM, "--format", "json")
    assert outcome.exit_code == 0, outcome.stderr
    jsonschema.validate(json.loads(outcome.stdout), SCHEMA)
    assert json.loads(outcome.stdout) == memplan.admit(str(file), PLATFORM).to_dict()
    table = run("admit", str(file), "--pools", PLATFORM)
    assert table.stdout.startswith("Admitted to dev\n")
    assert "that were said to fit, 0 died" in table.stdout or "No real run" in table.stdout
    large = {**SMALL, "model": "llama-3.1-70b", "engine": "fsdp"}
    file.write_text(yaml.safe_dump(large))
    refused = run("admit", str(file), "--pools", PLATFORM, "--format", "json")
    assert (refused.exit_code, refused.stderr.count("\n")) == (5, 1)
    assert json.loads(refused.stdout)["reason"] in refused.stderr


@pytest.mark.parametrize("words", [(), ("--network",)])
def test_the_hub_is_asked_only_where_that_is_allowed(
    run: Run, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def looked(*_: Any, **__: Any) -> None:
        seen.append(os.environ.get("HF_HUB_OFFLINE"))
        raise memplan.MemplanError

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("memplan.options.admitting.admission", looked)
    (tmp_path / "request.yaml").write_text("model: gpt2")
    run("admit", str(tmp_path / "request.yaml"), "--pools", PLATFORM, *words)
    assert seen == ([None] if words else ["1"])
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    ("request_text", "words", "exit_code", "said"),
    [
        ("model: gpt2", ("--pools", PLATFORM, "--pool", "h10"), 3, "Did you mean 'h100'?"),
        ("model: gpt2\ngpu: h100", ("--pools", PLATFORM), 3, "gpu: the pools say it"),
        ("model: gpt2\nseqlen: 5", ("--pools", PLATFORM), 3, "there is no option 'seqlen'"),
        ("gpus: 2", ("--pools", PLATFORM), 3, "model: name one"),
        ("model: gpt2", (), 2, "--pools: name the file"),
        ("model: gpt2", ("--pools", PLATFORM, "--fail-on", "all"), 2, "is not one of oom, tight"),
        ("model: /etc/passwd", ("--pools", PLATFORM), 3, "lies outside"),
        ("model: no-one/has-this", ("--pools", PLATFORM), 4, ""),
        ("[model]", ("--pools", PLATFORM), 3, "must hold keys and values"),
        ("model: gpt2", ("--pools", "nowhere.yaml"), 2, "there is no such file"),
        ("model: gpt2", ("--pools", PLATFORM, "--root", "nowhere"), 2, "is no folder"),
    ],
)
def test_what_cannot_be_judged(
    run: Run, tmp_path: Path, request_text: str, words: tuple[str, ...], exit_code: int, said: str
) -> None:
    file = tmp_path / "request.yaml"
    file.write_text(request_text)
    outcome = run("admit", str(file), *words)
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (exit_code, 1), outcome.stderr
    assert said in outcome.stderr
    assert outcome.stdout == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools: []", "write a list of at least one pool"),
        ("pool: []", "unknown key 'pool'"),
        ("pools: [3]", "pool 1: write its keys"),
        ("pools: [{gpu: t4, count: 1}]", "name is missing"),
        ("pools: [{name: a, count: 1}]", "gpu is missing"),
        ("pools: [{name: a, gpu: t4}]", "count is missing"),
        ("pools: [{name: a, gpu: t4, count: -3}]", "count: write a whole number from 1 on"),
        ("pools: [{name: a, gpu: t4, count: true}]", "count: write a whole number"),
        ("pools: [{name: a, gpu: t4, count: 1, quota: 0}]", "quota: write a whole number"),
        ("pools: [{name: a, gpu: t4, count: 1, price: -1}]", "price: write what one GPU costs"),
        ("pools: [{name: a, gpu: t4, count: 1, price: .inf}]", "price' is inf, which is not a number"),
        ("pools: [{name: a, gpu: t4, count: 1, prize: 1}]", "Did you mean 'price'?"),
        ("pools: [{name: a, gpu: t44, count: 1}]", "gpu: "),
        ("pools: [{name: a, gpu: t4, count: 1, cpu_memory: lots}]", "cpu_memory: "),
        ("pools: [{name: a, gpu: t4, count: 1, scheduler: slrm}]", "Did you mean 'slurm'?"),
        ("pools: [{name: a, gpu: t4, count: 1, queue: 'a; rm -rf /'}]", "other characters than"),
        ("pools: [{name: a, gpu: t4, count: 1}, {name: a, gpu: t4, count: 1}]", "there twice"),
        ("pools: [{name: [a], gpu: t4, count: 1}]", "name: write a text"),
    ],
)  # fmt: skip
def test_pools_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(text)
    with pytest.raises(memplan.MemplanError) as caught:
        read_pools(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


# -- hooks -------------------------------------------------------------------------------------------------


@pytest.fixture
def command_folder(tmp_path: Path) -> Path:
    """A folder whose ``memplan`` is this checkout's."""
    script = tmp_path / "memplan"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memplan "$@"\n')
    script.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(CONFIGS.parent),
    }


@pytest.fixture
def webhook(command_folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(ADMISSION / "webhook.py"), PLATFORM, "--port", str(port)],
        env=environment(command_folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == f"listening on port {port}\n"
    yield f"http://127.0.0.1:{port}/"
    process.kill()
    process.wait()
    process.stdout.close()


def job(request: str | None, gpus: int = 2) -> dict[str, Any]:
    container = {"name": "train", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"annotations": {} if request is None else {"memplan/request": request}},
        "spec": {"parallelism": 1, "template": {"spec": {"containers": [container]}}},
    }


def asked(url: str, body: bytes) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_the_kubernetes_webhook(webhook: str) -> None:
    small = yaml.safe_dump(SMALL)
    large = yaml.safe_dump({**SMALL, "model": "llama-3.1-70b", "engine": "fsdp"})
    for given, allowed, said in (
        (job(small), True, "memplan: dev: fits"),
        (job(None), True, "not judged"),
        (job(large), False, "does not fit"),
        (job(small, gpus=1), False, "is of 2 GPUs, and the job takes 1"),
        (job("model: [1]"), False, ""),
        ({"apiVersion": "v1", "kind": "ConfigMap"}, True, "not judged"),
    ):
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                  "request": {"uid": "some-uid", "object": given}}  # fmt: skip
        answer = asked(webhook, json.dumps(review).encode())
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response = answer["response"]
        assert (response["uid"], response["allowed"]) == ("some-uid", allowed)
        words = "".join(response.get("warnings", ())) or response["status"]["message"]
        assert said in words
        assert "\n" not in words
    for body in (
        b"",
        b"[]",
        b"{}",
        b'{"request": 3}',
        b"\xff",
        b'{"request": {"uid": 1, "object": [1]}}',
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            asked(webhook, body)
        assert caught.value.code in (400, 413)
        caught.value.close()


def test_its_registration() -> None:
    registered = yaml.safe_load((ADMISSION / "kubernetes.yaml").read_text())
    (hook,) = registered["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    assert hook["sideEffects"] == "None"
    assert 1 <= hook["timeoutSeconds"] <= 30


def popen(lua: Any, command: str) -> Any:
    """What Lua's own does, which this build of it leaves out."""
    printed = subprocess.run(
        command, shell=True, text=True, capture_output=True, check=False
    ).stdout
    return lua.table(read=lambda _, __: printed, close=lambda _: True)


@pytest.mark.parametrize(
    ("script", "partition", "accepted", "said"),
    [
        ("#!/bin/bash\nsrun train", "dev", True, ""),
        ("#!/bin/bash\n#MEMPLAN model: gpt2\n#MEMPLAN gpus: 2\nsrun train", "dev", True, ""),
        ("#MEMPLAN model: llama-3.1-70b\n#MEMPLAN gpus: 8", "a100-batch", False, "does not fit"),
        ("#MEMPLAN model: gpt2\n#MEMPLAN gpus: 64", "dev", False, "has 8 GPUs of the 64"),
        ("#MEMPLAN model: '; touch stolen; '", None, False, ""),
        ("#MEMPLAN modell: gpt2", None, False, "no option 'modell'"),
        ("#MEMPLAN model: gpt2", None, True, "not judged"),
        (None, None, True, ""),
    ],
)
def test_slurm_s_job_submit(
    command_folder: Path, script: str | None, partition: str | None, accepted: bool, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lupa = pytest.importorskip("lupa")
    for name, value in environment(command_folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MEMPLAN_POOLS", "gone.yaml" if said == "not judged" else PLATFORM)
    monkeypatch.chdir(command_folder)
    lua = lupa.LuaRuntime()
    told: list[str] = []
    lua.globals().slurm = lua.table(
        SUCCESS=0, ERROR=-1, log_user=lambda *words: told.append(str(words)), log_info=lambda *words: told.append(str(words))
    )  # fmt: skip
    lua.globals().io.popen = lambda command: popen(lua, command)
    lua.execute((ADMISSION / "job_submit.lua").read_text())
    code = lua.globals().slurm_job_submit(lua.table(script=script, partition=partition), None, 1000)
    assert (code == 0) is accepted, told
    assert said in "".join(told)
    assert not (command_folder / "stolen").exists()
