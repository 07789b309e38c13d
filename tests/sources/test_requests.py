"""Requests for schedulers: what is asked for is what was estimated, in words that each scheduler takes."""

import ast
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

import memplan
from memplan.estimator.job_request import (
    NUM_WORKERS,
    PROCESS_BYTES,
    WORKER_BYTES,
    JobRequest,
    checkpoint_bytes,
    job_request,
    shared_bytes,
)
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.sources.requests import Scheduler, request_text
from memplan.units import GIB
from tests.conftest import Outcome

Run = Callable[..., Outcome]

SETUPS: dict[str, dict[str, Any]] = {
    "one": {"model": "gpt2", "gpus": 1, "gpu": "t4"},
    "lora": {"model": "llama-3.2-1b", "gpus": 1, "gpu": "rtx4090", "lora": 16},
    "ddp": {"model": "gpt2", "gpus": 4, "engine": "ddp", "gpu": "a10g"},
    "zero 2": {"model": "t5-small", "gpus": 8, "zero": 2, "gpu": "v100"},
    "offload": {"model": "llama-3.2-1b", "gpus": 8, "zero": 3, "offload": "cpu", "gpu": "a100-40gb"},
    "fsdp": {"model": "llama-3.2-1b", "gpus": 16, "engine": "fsdp", "gpu": "h100", "allocator": "expandable"},
    "megatron": {"model": "llama-3.2-1b", "gpus": 16, "engine": "megatron", "tensor_parallel": 2, "gpu": "h200"},
    "amd": {"model": "gpt2", "gpus": 8, "engine": "fsdp", "gpu": "mi300x"},
}  # fmt: skip
"""Setups that a request is written of, as ``memplan.estimate`` takes them."""
A_RUN = TimeQuestion(tokens=2_000_000_000)


@pytest.fixture(scope="module")
def requests() -> dict[str, JobRequest]:
    found = {}
    for name, options in SETUPS.items():
        answer = memplan.estimate(**options)
        found[name] = job_request(answer, A_RUN)
        assert found[name].memory_bytes > answer.host_bytes
    return found


def test_a_node_is_asked_for_what_its_ranks_need() -> None:
    answer = memplan.estimate("llama-3.2-1b", gpus=16, engine="fsdp", gpu="h100")
    found = job_request(answer, None)
    assert (found.num_nodes, found.gpus_per_node, found.num_gpus) == (2, 8, 16)
    assert found.shared_bytes == GIB + 8 * NUM_WORKERS * 2 * 2048 * 3 * 8
    ranks = 8 * (PROCESS_BYTES + NUM_WORKERS * WORKER_BYTES)
    assert found.memory_bytes == answer.host_bytes + ranks + shared_bytes(answer)
    assert found.time_s is None
    # bf16-mixed: weights in fp32, two states of fp32.
    assert checkpoint_bytes(answer) == answer.num_params * 12
    assert found.disk_bytes == 2 * checkpoint_bytes(answer)


def test_a_checkpoint_by_precision_and_adapter() -> None:
    masters = memplan.estimate("llama-3.2-1b", gpus=8, zero=3)
    assert checkpoint_bytes(masters) == masters.num_params * (2 + 4 + 8)
    adapter = memplan.estimate("llama-3.2-1b", lora=16)
    formats = {"bf16-autocast": 2}
    assert adapter.setup.precision is not None
    weights = formats[adapter.setup.precision.value]
    states = checkpoint_bytes(adapter) - adapter.trainable_params * weights
    assert states in (adapter.trainable_params * 8, adapter.trainable_params * 4)


def test_time_is_the_high_end_in_whole_minutes() -> None:
    options = SETUPS["fsdp"]
    answer = memplan.estimate(**options)
    found = job_request(answer, A_RUN)
    told = memplan.estimate(**options, tokens=2_000_000_000).to_dict()
    high_s = float(str(told["run_high_days"])) * 86_400
    assert found.time_s is not None
    assert found.time_s % 60 == 0
    assert high_s <= found.time_s * 1.001
    assert found.time_s <= high_s * 1.001 + 121


SBATCH = {
    "job-name": r"[a-z0-9-]{1,50}",
    "nodes": r"[1-9]\d*",
    "ntasks-per-node": r"1",
    "gpus-per-node": r"[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*",
    "mem": r"[1-9]\d*[KMGT]",
    "time": r"\d+-\d\d:\d\d:\d\d",
}
"""Options of ``sbatch(1)`` and what it takes as their values."""


@pytest.mark.parametrize("name", SETUPS)
def test_slurm(requests: dict[str, JobRequest], name: str) -> None:
    request = requests[name]
    text = request_text(request, Scheduler.SLURM)
    assert text.startswith("#!/bin/bash\n")
    subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    lines = text.splitlines()
    options = dict(
        each.removeprefix("#SBATCH --").split("=", 1)
        for each in lines
        if each.startswith("#SBATCH")
    )
    assert options.keys() == SBATCH.keys()
    for key, value in options.items():
        assert re.fullmatch(SBATCH[key], value), (key, value)
    # sbatch stops looking for options at the first line that is a command.
    first_command = next(
        number for number, each in enumerate(lines) if each and not each.startswith("#")
    )
    assert not any(each.startswith("#SBATCH") for each in lines[first_command:])
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == request.num_gpus
    assert int(options["mem"][:-1]) * 2**20 >= request.memory_bytes
    assert ("expandable_segments:True" in text) is (name == "fsdp")
    launched = shlex.split(lines[-1])
    assert launched[:2] == ["srun", "torchrun"]
    assert ("--nnodes=2" in launched) is (request.num_nodes == 2)


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize(
    "scheduler", [Scheduler.KUBERNETES, Scheduler.KUEUE], ids=lambda each: each.value
)
def test_kubernetes_and_kueue(
    requests: dict[str, JobRequest], name: str, scheduler: Scheduler
) -> None:
    request = requests[name]
    *services, job = yaml.safe_load_all(request_text(request, scheduler))
    assert len(services) == (request.num_nodes > 1)
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == request.num_nodes
    assert spec["activeDeadlineSeconds"] == request.time_s
    assert spec.get("suspend") is (True if scheduler is Scheduler.KUEUE else None)
    assert ("kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {})) is (
        scheduler is Scheduler.KUEUE
    )
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"]
    resource = "amd.com/gpu" if name == "amd" else "nvidia.com/gpu"
    assert limits[resource] == request.gpus_per_node
    assert int(limits["memory"].removesuffix("Gi")) * GIB >= request.memory_bytes
    (volume,) = pod["volumes"]
    assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB >= request.shared_bytes
    assert container["volumeMounts"][0]["mountPath"] == "/dev/shm"
    if services:
        assert (
            services[0]["spec"]["selector"].items()
            <= spec["template"]["metadata"]["labels"].items()
        )
        assert pod["subdomain"] == services[0]["metadata"]["name"]
        named = {each["name"] for each in container["env"]}
        used = {each for word in container["command"] for each in re.findall(r"\$\((\w+)\)", word)}
        assert used <= named


@pytest.mark.parametrize("name", SETUPS)
def test_skypilot(requests: dict[str, JobRequest], name: str) -> None:
    request = requests[name]
    task = yaml.safe_load(request_text(request, Scheduler.SKYPILOT))
    assert task["num_nodes"] == request.num_nodes
    card, _, count = task["resources"]["accelerators"].partition(":")
    assert card
    assert int(count) == request.gpus_per_node
    assert int(task["resources"]["memory"].removesuffix("+")) * GIB >= request.memory_bytes
    assert task["resources"]["disk_size"] * 10**9 >= request.disk_bytes * 10**9 // GIB
    subprocess.run(["/bin/bash", "-n"], input=task["run"], text=True, check=True)


@pytest.mark.parametrize("name", SETUPS)
def test_ray(requests: dict[str, JobRequest], name: str) -> None:
    request = requests[name]
    tree = ast.parse(request_text(request, Scheduler.RAY))
    (scaling,) = [each for each in calls(tree) if getattr(each.func, "id", "") == "ScalingConfig"]
    given = {each.arg: ast.literal_eval(each.value) for each in scaling.keywords}
    assert given["num_workers"] == request.num_gpus
    worker = given["resources_per_worker"]
    assert worker["memory"] * request.gpus_per_node >= request.memory_bytes
    assert worker["CPU"] * request.gpus_per_node >= request.num_cores


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(tree) if isinstance(each, ast.Call))


def test_the_command_line(run: Run, tmp_path: Any) -> None:
    file = tmp_path / "job.sbatch"
    asked = ("estimate", "gpt2", "--gpus", "8", "--engine", "fsdp", "--gpu", "h100")
    outcome = run(*asked, "--emit", "slurm", "--output", str(file))
    assert outcome.exit_code == 0
    assert "no time limit is written: --tokens or --examples" in outcome.stderr
    assert "#SBATCH --gpus-per-node=8" in file.read_text()
    assert "#SBATCH --time=" in run(*asked, "--tokens", "1B", "--emit", "slurm").stdout


@pytest.mark.parametrize(
    ("words", "said", "exit_code"),
    [
        (
            ("--engine", "fsdp", "--emit", "slrm", "--gpu", "h100"),
            "'slrm' is not one of deepspeed",
            3,
        ),
        (("--engine", "fsdp", "--emit", "slurm"), "name it with --gpu", 2),
        (("--emit", "slurm", "--gpu", "h100"), "name --engine, --zero, --offload", 2),
    ],
)
def test_what_cannot_be_written(
    run: Run, words: tuple[str, ...], said: str, exit_code: int
) -> None:
    outcome = run("estimate", "gpt2", "--gpus", "8", *words)
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (exit_code, 1)
    assert said in outcome.stderr


@pytest.mark.parametrize("name", ["x" * 200, "org/Model_1.5 (new)", "---", "\u00e9"])
def test_a_name_that_every_scheduler_takes(name: str) -> None:
    answer = memplan.estimate(replace(memplan.load_model("gpt2"), name=name), gpus=2, engine="ddp")
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{,48}[a-z0-9])?", job_request(answer, None).name)
