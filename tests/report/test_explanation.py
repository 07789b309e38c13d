"""The account taken apart: the parts add up to the whole, to the byte."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from memplan.estimator import Estimate, estimate
from memplan.memory.account import Lifetime
from memplan.report.explained.explanation import explain_estimate
from memplan.report.explained.nodes import Node, walk_nodes
from memplan.report.timeline import columns_of, step_moments, timeline_lines
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

SCALARS_BYTES = 2048
"""Scalars that the run has block by block and the account sums up otherwise: the loss, DeepSpeed's norms."""

MODELS = ("llama-3.2-1b", "gpt2", "t5-small", "bert-base-uncased", "mixtral-8x7b", "gemma-2-2b")
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpointing": "full"},
    "eager": {"precision": "bf16", "attention": "eager"},
    "megatron": {"precision": "bf16", "kernels": "megatron", "checkpointing": "selective"},
    "torchtitan": {"precision": "bf16", "kernels": "torchtitan", "checkpointing": "selective"},
}
ENGINES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_stage": 0},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "zero-3-offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "fsdp": {"engine": "fsdp"},
    "ddp": {"engine": "ddp"},
}


def answer(model: str, gpu: str | None = None, **setup: Any) -> Estimate:
    card = load_gpu(gpu) if gpu else None
    return estimate(load_model(model), TrainingSetup(seq_len=512, **setup), card)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("model", MODELS)
def test_layers_hold_what_stays_after_forward(model: str, setup: dict[str, Any]) -> None:
    """Nothing but the loss itself, rounded up to a block, stands beside the lists."""
    explained = explain_estimate(answer(model, **setup))

    listed = sum(kind.count * kind.kept_bytes for kind in explained.layers)
    assert explained.kept_bytes - listed == 512


@pytest.mark.parametrize("setup", ENGINES.values(), ids=ENGINES)
def test_every_node_is_the_sum_of_its_parts(setup: dict[str, Any]) -> None:
    found = answer("llama-3.2-1b", num_gpus=8, **setup)
    explained = explain_estimate(found)

    for phase in explained.phases:
        assert phase.num_bytes == found.phases[phase.name].peak_bytes
        for _, node in walk_nodes(phase):
            if node.children:
                assert node.num_bytes == sum(child.num_bytes for child in node.children)
    assert explained.peak == found.peak_phase


def test_parameters_are_listed_tensor_by_tensor() -> None:
    explained = explain_estimate(answer("llama-3.2-1b", precision="bf16"))
    peak = next(phase for phase in explained.phases if phase.name == explained.peak)
    nodes = {node.name: node for _, node in walk_nodes(peak)}

    assert nodes["self_attn.k_proj.weight"].formula == "16 x 512 x 2,048 x 2 B (bf16)"
    assert nodes["parameters"].formula == "2 B x 1,235,814,400 parameters"
    assert nodes["optimizer states"].formula == "4 B x 1,235,814,400 trained parameters"


def test_sizes_are_named() -> None:
    explained = explain_estimate(answer("llama-3.2-1b", precision="bf16", attention="eager"))
    layer = next(kind for kind in explained.layers if kind.name == "decoder.layers")
    found = {node.name: node.formula for node in layer.tensors}

    assert found["gate_proj"] == "512 tokens x 8,192 (feed-forward) x 2 B (bf16)"
    assert found["softmax"] == "1 x 32 heads x 512 x 512 x 4 B (fp32)"


def test_a_checkpointed_layer_keeps_its_input() -> None:
    explained = explain_estimate(answer("gpt2", checkpointing="full"))
    layer = next(kind for kind in explained.layers if kind.name == "decoder.layers")

    assert layer.tensors == (
        Node(
            name="its input",
            num_bytes=512 * 768 * 4,
            formula="512 tokens x 768 (hidden) x 4 B (fp32)",
            source="checkpointed: everything else is computed again",
        ),
    )


@pytest.mark.parametrize("setup", [*SETUPS.values(), *({"num_gpus": 8, **each} for each in ENGINES.values())], ids=[*SETUPS, *ENGINES])  # fmt: skip
def test_timeline_reaches_each_phase_s_peak_and_no_higher(setup: dict[str, Any]) -> None:
    found = answer("llama-3.2-1b", **setup)
    moments = step_moments(found)
    # ZeRO's account has a flat copy in backward that its program leaves out for some ranks.
    exact = found.setup.chosen_engine is not Engine.DEEPSPEED

    assert {moment.phase for moment in moments} == set(found.phases)
    for name, phase in found.phases.items():
        highest = max(moment.total_bytes for moment in moments if moment.phase == name)
        assert highest <= phase.peak_bytes + SCALARS_BYTES
        if exact:
            assert highest >= phase.peak_bytes - SCALARS_BYTES
    assert max(moment.total_bytes for moment in columns_of(moments, 40)) == max(
        moment.total_bytes for moment in moments
    )


def test_timeline_drawing() -> None:
    lines = timeline_lines(answer("llama-3.2-1b", "v100-16gb", micro_batch_size=2), width=95)

    assert lines[0].startswith("GiB")
    assert "▼" in lines[0]
    assert any("╌ V100-16" in line for line in lines)
    assert all(len(line) <= 95 for line in lines)
    assert [word in lines[-2] for word in ("load", "forward", "backward", "step")] == [True] * 4


@pytest.mark.parametrize(
    ("num_gpus", "words"), [(1, "+ 0.1-1.3 context"), (8, "+ 0.6-3.3 context, NCCL")]
)
def test_what_lies_beside_the_allocator_is_drawn(num_gpus: int, words: str) -> None:
    found = answer("llama-3.2-1b", "v100-16gb", num_gpus=num_gpus)
    lines = timeline_lines(found)

    (named,) = [number for number, line in enumerate(lines) if line.endswith(words)]
    (reserved,) = [number for number, line in enumerate(lines) if line.endswith("· reserved")]
    assert named < reserved
    assert all("++++" in line for line in lines[named:reserved])


def test_timeline_says_when_the_gpu_is_out_of_the_picture() -> None:
    lines = timeline_lines(answer("gpt2", "h100"))

    assert lines[-1].strip() == "H100-80 holds 79.2 GiB, beyond this drawing"


def test_lifetimes_of_the_peak() -> None:
    found = answer("llama-3.2-1b", precision="bf16")
    fullest = max(step_moments(found), key=lambda moment: moment.total_bytes)
    by_lifetime = dict.fromkeys(Lifetime, 0)
    for entry in found.account.peak.entries:
        by_lifetime[entry.kind.lifetime] += entry.num_bytes

    drawn = {
        Lifetime.LONG: fullest.long_bytes,
        Lifetime.MEDIUM: fullest.medium_bytes,
        Lifetime.SHORT: fullest.short_bytes,
    }
    total = sum(by_lifetime.values())
    assert sum(drawn.values()) == pytest.approx(total, abs=SCALARS_BYTES)
    # The tied weight's gradient of the head, which waits for that of the embedding, is one: the
    # account has it among the head's bytes and what is on its way.
    waiting = 128256 * 2048 * 2
    assert drawn[Lifetime.LONG] == by_lifetime[Lifetime.LONG] + waiting


@pytest.mark.parametrize("setup", [{}, {"num_gpus": 8, "engine": "fsdp"}], ids=str)
def test_what_is_reserved_stands_above_what_is_alive(setup: dict[str, Any]) -> None:
    moments = step_moments(answer("llama-3.2-1b", **setup))

    assert all(
        moment.reserved_bytes >= moment.total_bytes for moment in moments if moment.phase != "save"
    )
    lines = timeline_lines(answer("llama-3.2-1b", **setup))
    (line,) = [line for line in lines if line.endswith("· reserved")]
    assert line.count("·") > 5


def test_json(run: Callable[..., Any]) -> None:
    outcome = run("explain", "gpt2", "--format", "json")
    document = json.loads(outcome.stdout)

    assert document["schema_version"] == 1
    rows = {row["path"]: row["bytes"] for row in document["rows"] if row["section"] == "account"}
    found = estimate(load_model("gpt2"), TrainingSetup(), load_gpu("a100-80gb"))
    assert rows["backward"] == found.phases["backward"].peak_bytes
    assert any(row["section"] == "kept" for row in document["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a MODEL"),
        (("gpt2", "--zero", "1-3", "--gpus", "8"), "takes one"),
        (("gpt2", "--report", "report.pdf"), "must end in .html"),
        (("gpt2", "--operation", "sigmoid-chain"), "1 GiB"),
        (("gpt2", "--report", "r.html", "--format", "csv"), "--format makes no use of --report"),
    ],
    ids=["no model", "three stages", "ending", "model and operation", "report and format"],
)
def test_usage_errors(run: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    outcome = run("explain", *arguments)

    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1
