"""Setups that spread experts over ranks: what each holds, and what is refused, with what to do."""

from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.search.planning.floors import activations_floor, resident_floor, states_floor
from memplan.search.planning.sizes import model_sizes
from memplan.sources.cards.catalog import load_gpu
from memplan.training.setup import TrainingSetup

SPREAD: dict[str, Any] = {"num_gpus": 16, "engine": "fsdp", "expert_parallel": 8}


def test_what_each_rank_holds() -> None:
    one_each = {**SPREAD, "num_gpus": 8}
    alone = memplan.estimate("mixtral-8x7b", TrainingSetup(**{**one_each, "expert_parallel": 1}))
    spread = memplan.estimate("mixtral-8x7b", TrainingSetup(**one_each))
    assert spread.num_params == alone.num_params
    # An expert for each rank either way; but what is gathered is not.
    assert spread.held_bytes == pytest.approx(alone.held_bytes)
    gathered = [
        each.phases["backward"].components["gathered_parameters"] for each in (alone, spread)
    ]
    assert gathered[1] < gathered[0] / 2
    assert any("spread over 8 ranks" in text for text in spread.assumptions)


def test_tokens_beyond_an_even_share_cost_their_rows() -> None:
    even = memplan.estimate("mixtral-8x7b", TrainingSetup(**SPREAD))
    crowded = memplan.estimate("mixtral-8x7b", TrainingSetup(**SPREAD, expert_imbalance=2))
    # Per row and layer: what is permuted, and four of the network's width, in 16 bits.
    rows = 2048 * 2
    expected = 32 * rows * 2 * (4096 + 4 * 14336)
    assert crowded.activations_bytes - even.activations_bytes == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    ("model", "pairs", "widths"),
    [
        # What is permuted; h, its clamped halves, a sigmoid, out_glu and what addcmul makes; two rows' numbers of 64 bits.
        pytest.param(
            "gpt-oss-20b", 24 * 4, 2880 + 7 * 2880 + 2 * 4, id="gate and up in one, with biases"
        ),
        # What is permuted, what relu makes, and its square.
        pytest.param("nemotron-3-nano-30b-a3b", 23 * 6, 2688 + 2 * 1856, id="without a gate"),
    ],
)
def test_other_experts_than_three_plain_matrices(model: str, pairs: int, widths: int) -> None:
    """torchtitan's ``GptOssGroupedExperts`` and AutoModel's ``up_projs``: all that ranks hold, and what a row keeps."""
    spread = {**SPREAD, "num_gpus": 8, "precision": "bf16"}
    even = memplan.estimate(model, TrainingSetup(**spread))
    crowded = memplan.estimate(model, TrainingSetup(**spread, expert_imbalance=2))
    assert even.num_params == memplan.load_model(model).num_params
    expected = pairs * 2048 * 2 * widths
    assert crowded.activations_bytes - even.activations_bytes == pytest.approx(expected, rel=2e-3)


def test_8_bits_are_of_linear_layers() -> None:
    """Experts are none, spread or not: what narrow copies of attention's operands take is the same."""
    more = []
    for degree in (1, 8):
        spread = {**SPREAD, "num_gpus": 8, "expert_parallel": degree, "precision": "bf16"}
        kept = [
            memplan.estimate("mixtral-8x7b", TrainingSetup(**spread, fp8=how)).activations_bytes
            for how in ("none", "te-current")
        ]
        more.append(kept[1] - kept[0])
    assert more[0] == more[1] > 0


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        pytest.param("llama-3.1-8b", {}, "has no experts", id="dense"),
        pytest.param("mixtral-8x7b", {"expert_parallel": 16}, "8 = 16 x 0 [+] 8", id="experts"),
        pytest.param("mixtral-8x7b", {"num_gpus": 12}, "12 = 8 x 1 [+] 4", id="ranks"),
        pytest.param("mixtral-8x7b", {"engine": "deepspeed"}, "engine is deepspeed", id="engine"),
        pytest.param("deepseek-v4-flash", {}, "in a way of its own", id="other experts"),
        pytest.param("mixtral-8x7b", {"tensor_parallel": 2}, "with sequence_parallel", id="TP"),
        pytest.param(
            "mixtral-8x7b",
            {"expert_parallel": 2, "tensor_parallel": 4, "sequence_parallel": True},
            "2 is no multiple of tensor_parallel, 4",
            id="TP over more",
        ),
        pytest.param("mixtral-8x7b", {"expert_imbalance": 0.5}, "from 1", id="less than even"),
        pytest.param(
            "mixtral-8x7b", {"expert_parallel": 1, "expert_imbalance": 2}, "give it too", id="alone"
        ),
        pytest.param("mixtral-8x7b", {"precision": "fp32"}, "precision: fp32", id="fp32"),
        pytest.param(
            "mixtral-8x7b",
            {"adapter": memplan.Lora(rank=8, parameters=("gate_up_proj",))},
            "adapter: parameters: is not modelled",
            id="adapters of experts",
        ),
        pytest.param("mixtral-8x7b", {"adapter": memplan.Ia3()}, "adapter: IA3", id="IA3"),
    ],
)
def test_refusals(model: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        memplan.estimate(model, TrainingSetup(**{**SPREAD, **fields}))


def test_a_stage_may_have_no_experts() -> None:
    """DeepSeek-V2-Lite's first layer is dense, and a stage of its own here; a model without experts is refused all the same."""
    stages = {
        **SPREAD,
        "num_gpus": 216,
        "pipeline_parallel": 27,
        "expert_parallel": 2,
        "gradient_accumulation_steps": 28,
    }
    answer = memplan.estimate("deepseek-v2-lite", TrainingSetup(**stages))
    assert answer.setup.expert_parallel == 2
    with pytest.raises(SetupError, match="has no experts"):
        memplan.estimate(
            "llama-3.2-3b", TrainingSetup(**{**stages, "num_gpus": 224, "pipeline_parallel": 28})
        )


def test_a_range_of_shares_is_a_range_of_bytes() -> None:
    model = memplan.load_model("mixtral-8x7b")
    gpu = load_gpu("h200")
    ranged, even, crowded = (
        estimate(model, TrainingSetup(**SPREAD, expert_imbalance=imbalance), gpu)
        for imbalance in ("1..8", 1, 8)
    )
    assert ranged.peak_bytes == even.peak_bytes
    assert ranged.total_bytes == even.total_bytes.up_to(crowded.total_bytes)
    assert ranged.to_dict()["crowded_peak_bytes"] == crowded.peak_bytes
    assert [each.verdict for each in (even, ranged, crowded)] == ["fits", "tight", "OOM"]
    assert any("1-8 times an even share" in text for text in ranged.assumptions)
    usual = estimate(model, TrainingSetup(**SPREAD), gpu)
    assert even.total_bytes.high < usual.total_bytes.high < crowded.total_bytes.high
    assert any(
        "1-1.25 times an even share of the tokens (default)" in each for each in usual.assumptions
    )


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"tensor_parallel": 4, "sequence_parallel": True},
        {"pipeline_parallel": 2, "gradient_accumulation_steps": 4},
    ],
    ids=["alone", "TP", "PP"],
)
def test_a_plan_expects_no_more_than_an_estimate(beside: dict[str, Any]) -> None:
    model = memplan.load_model("mixtral-8x7b")
    answer = estimate(model, TrainingSetup(**SPREAD, **beside, checkpointing="full"))  # type: ignore[arg-type]
    sizes = model_sizes(model)
    handed_on = activations_floor(answer.setup, sizes)
    assert states_floor(answer.setup, sizes) <= answer.peak_bytes
    assert resident_floor(answer.setup, sizes) + handed_on <= answer.peak_bytes


@pytest.mark.parametrize("degree", [1, 8])
def test_adapters_outside_of_experts_are_held_as_any_weight(degree: int) -> None:
    """``r·(in + out)`` of each linear layer; experts that are spread are frozen, and none of them has a gradient."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    setup = TrainingSetup(
        num_gpus=8,
        engine="fsdp",
        precision="bf16",
        expert_parallel=degree,
        adapter=memplan.Lora(rank=16, targets=targets, dtype="bf16"),  # type: ignore[arg-type]
    )
    found = memplan.estimate("mixtral-8x7b", setup)
    trained = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert found.trainable_params == trained
    step = found.phases["step"].components
    assert step["gradients"] == pytest.approx(trained * 2 / 8)
    assert step["optimizer_states"] == pytest.approx(2 * trained * 2 / 8, rel=0.02)
    assert step["parameters"] == pytest.approx((46_702_792_704 + trained) * 2 / 8)


def test_names_of_experts_matrices_mean_modules_where_they_are_spread() -> None:
    """peft makes one adapter of all experts of such names; what spreads experts adapts linear layers alone (NeMo
    AutoModel 0.7, components/_peft/lora.py), as Qwen3's attention."""
    setup = TrainingSetup(
        num_gpus=8,
        engine="fsdp",
        precision="bf16",
        expert_parallel=8,
        adapter=memplan.Lora(rank=8, targets=".*_proj"),
    )
    found = memplan.estimate("qwen3-30b-a3b", setup)
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    assert found.trainable_params == 48 * 8 * attention
    assert any("experts that are spread have none" in each for each in found.assumptions)
