"""Evaluation between steps, against runs of PyTorch's CUDA build that evaluate as transformers' Trainer does.

``tests/data/evaluation.json`` holds 28 of them: one GPU, DDP, FSDP2, ZeRO-2 and ZeRO-3, with the loss alone or
with logits kept, in batches of once to eight times the micro-batch; eight with a reference model (DPO, KTO).
``pipelines`` has ranks of torch 2.13's stages that evaluate as torchtitan's ``Validator`` does, ``tiled`` losses of
DeepSpeed 0.19.8's functions.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "evaluation.json").read_text()
)
TOLERANCE = 1e-4
"""The runs count what was asked for; memplan rounds each tensor up to the allocator's 512 bytes."""
RESERVED = 1e-6
"""Equal to the byte."""
LEAST = 2.5e-3
"""The runs' own is found to 1/512 of the peak. Of one it is an island: with a little more the run dies again."""
LEAST_OF_JOBS = 1 / 128
"""As far as theirs is found."""
OFF = {"dpo-zero3-b8": 1.1e-3, "kto-zero3-b8": 1.3e-3}
"""What is reserved of those in which two models' gathers share the card under stage 3: 4 MiB. A module's
weights go before or after the activation beside them, on two streams."""
FLOORS = {
    "fsdp2-b8": 3_386_900_480, "dpo-fsdp2-b8": 2402 << 20, "kto-fsdp2-b1": 1200 << 20,
}  # fmt: skip
"""From there on it lives: with 2 MiB less the real run dies too."""


def answer_to(case: dict[str, Any], **fields: Any) -> Estimate:
    model = load_model(DATA["models"][case["model"]], "causal-lm")
    setup = TrainingSetup(**{**case["setup"], **fields})
    return estimate(model, setup, load_gpu("a100-80gb"), rank=0)


@pytest.mark.usefixtures("labels_are_ids")
@pytest.mark.parametrize("case", [pytest.param(each, id=each["id"]) for each in DATA["cases"]])
def test_as_the_real_run(case: dict[str, Any]) -> None:
    answer, truth = answer_to(case), case["truth"]
    for name in ("forward", "backward", "evaluation"):
        assert answer.phases[name].peak_bytes == pytest.approx(truth[name], rel=TOLERANCE), name
    off = LEAST_OF_JOBS if "job" in case["setup"] else LEAST
    reserved_off = OFF.get(case["id"], RESERVED)
    assert answer.reserved_bytes == pytest.approx(truth["reserved"], rel=reserved_off)
    least = truth["least_capacity"]
    assert answer.run.on_card(int(least * (1 + off))).died_at is None
    assert answer.run.on_card(int(least * (1 - off))).died_at is not None
    floor = FLOORS.get(case["id"])
    if floor is None:
        assert answer.required_bytes == pytest.approx(least, rel=off)
    else:
        assert answer.required_bytes == floor


@pytest.mark.parametrize("case", [DATA["cases"][1]], ids=["one-bf16-b8"])
def test_it_takes_part_in_every_figure(case: dict[str, Any]) -> None:
    answer, without = answer_to(case), answer_to(case, evaluation=None)
    assert answer.deciding_phase == "evaluation"
    assert answer.worst_bytes == answer.phases["evaluation"].peak_bytes > without.worst_bytes
    assert answer.total_bytes.low > without.total_bytes.high
    assert answer.peak_bytes == without.peak_bytes, "a training step is what it was"
    assert "evaluation" not in without.phases
    assert any("evaluation between steps in batches of 8" in text for text in answer.assumptions)


def split_answer(**fields: Any) -> Estimate:
    model = load_model(DATA["models"]["llama 1024 x4"], "causal-lm")
    return estimate(model, TrainingSetup(seq_len=128, **fields), load_gpu("h200"))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpus": 8, "engine": "fsdp", "tensor_parallel": 2},
        {"num_gpus": 4, "engine": "fsdp", "context_parallel": 2},
        {"num_gpus": 4, "engine": "megatron", "tensor_parallel": 2},
        {"job": "ppo"},
    ],
    ids=str,
)
def test_it_is_a_phase_of_models_that_are_split_and_of_ppo(fields: dict[str, Any]) -> None:
    """A larger batch needs more of it alone; its logits are shared as a step's are."""
    small, large = (split_answer(evaluation=batch, **fields) for batch in (1, 64))
    assert small.verdict == large.verdict == "fits"
    assert not small.unmodelled
    assert small.peak_bytes == large.peak_bytes
    assert large.phases["evaluation"].peak_bytes > small.phases["evaluation"].peak_bytes
    assert large.required_bytes > small.required_bytes
    degree = fields.get("tensor_parallel", 1) * fields.get("context_parallel", 1)
    if (degree > 1 and fields["engine"] == "megatron") or "context_parallel" in fields:
        whole = split_answer(
            evaluation=64, **{**fields, "tensor_parallel": 1, "context_parallel": 1}
        )
        logits = [
            each.phases["evaluation"].components["logits_and_loss"] for each in (large, whole)
        ]
        assert logits[0] * degree == pytest.approx(logits[1], rel=2e-4)


PIPELINE: dict[str, int] = DATA["pipelines"]["sizes"]
"""A Llama's, and the lengths: the same in every run."""


def pipelined(case: dict[str, Any], rank: int | None) -> Estimate:
    """A run of torch's stages as torchtitan calls them, one rank of it; None: the fullest."""
    hidden = PIPELINE["hidden_size"]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "intermediate_size": PIPELINE["intermediate_size"], "vocab_size": PIPELINE["vocab_size"],
        "num_hidden_layers": sum(case["layers"]), "tie_word_embeddings": False,
    }  # fmt: skip
    given = {
        "num_gpus": case["ranks"], "pipeline_parallel": case["ranks"], "engine": "ddp",
        "pipeline_schedule": case["schedule"], "virtual_stages": case["virtual"],
        "layers_per_stage": tuple(case["layers"]), "micro_batch_size": 1, "precision": "bf16",
        "gradient_accumulation_steps": PIPELINE["micro_batches"], "seq_len": PIPELINE["seq_len"],
        "evaluation": case["evaluation"],
    }  # fmt: skip
    model = load_model(config, "causal-lm")
    return estimate(model, TrainingSetup(**given), load_gpu("a100-80gb"), rank=rank)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, id=f"{each['schedule']}-{each['rank']}-{each['evaluation']}")
        for each in DATA["pipelines"]["cases"]
    ],
)
def test_a_pipeline_evaluates_as_the_real_one(case: dict[str, Any]) -> None:
    """``schedule.eval`` keeps the outputs of all micro-batches, and joins the last stage's logits."""
    answer, truth = pipelined(case, case["rank"]), case["truth"]
    assert answer.verdict == "fits"
    phases = answer.phases
    step = max(phases["forward"].peak_bytes, phases["backward"].peak_bytes)
    assert step == pytest.approx(truth["step"], rel=TOLERANCE)
    assert phases["evaluation"].peak_bytes == pytest.approx(truth["evaluation"], rel=TOLERANCE)
    assert answer.reserved_bytes == pytest.approx(truth["reserved"], rel=RESERVED)


@pytest.mark.parametrize("case", DATA["tiled"], ids=lambda case: f"{case['loss']}-{case['tiles']}")
def test_a_loss_in_tiles_is_evaluated_without_its_gradients(case: dict[str, Any]) -> None:
    """ArcticTraining's trainer calls DeepSpeed's tiled loss in evaluation too, where no input wants a gradient."""
    model = load_model(case["config"], "causal-lm")
    setup = TrainingSetup(
        precision="bf16", micro_batch_size=case["batch"], seq_len=case["seq_len"], loss=case["loss"],
        loss_tiles=case["tiles"], evaluation=case["evaluation"],
    )  # fmt: skip
    answer, truth = estimate(model, setup, load_gpu("a100-80gb")), case["truth"]
    assert answer.verdict == "fits"
    assert answer.phases["evaluation"].peak_bytes == pytest.approx(
        truth["evaluation"], rel=TOLERANCE
    )


def test_a_pipeline_is_judged_by_the_rank_that_evaluation_fills() -> None:
    """The last stage alone has logits; in a step the first one, with more in flight, is the fuller."""
    case = {**DATA["pipelines"]["cases"][0], "ranks": 2, "layers": [4, 2], "evaluation": 16}
    ranks = [pipelined(case, rank) for rank in range(2)]
    answer = pipelined(case, None)
    assert ranks[0].peak_bytes > ranks[1].peak_bytes
    assert ranks[1].worst_bytes > ranks[0].worst_bytes
    assert answer.worst_bytes == ranks[1].worst_bytes
    assert answer.deciding_phase == "evaluation"


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_where_nothing_is_kept_more_micro_batches_need_no_more(engine: str) -> None:
    """Megatron-LM's ``forward_only`` and DeepSpeed's two slots: a longer batch is one micro-batch after another."""
    fields = {"num_gpus": 2, "pipeline_parallel": 2, "gradient_accumulation_steps": 4}
    few, many = (split_answer(engine=engine, evaluation=size, **fields) for size in (8, 64))
    assert few.verdict == many.verdict == "fits"
    assert few.phases["evaluation"].peak_bytes == many.phases["evaluation"].peak_bytes
    assert few.phases["evaluation"].peak_bytes > few.phases["save"].peak_bytes


def test_logits_of_a_pipeline_are_kept_for_no_metrics() -> None:
    with pytest.raises(SetupError, match="batches_kept"):
        split_answer(
            num_gpus=2,
            pipeline_parallel=2,
            gradient_accumulation_steps=2,
            evaluation={"batch_size": 4, "batches_kept": 2},
        )
