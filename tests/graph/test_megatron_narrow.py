"""TransformerEngine's products in 8 bits under Megatron: what is kept, by hand, and what is sent and computed."""

import pytest

import memplan
from memplan.errors import SetupError
from memplan.estimator.job import Job
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.estimator.time.step_time import StepTime, time_of

WIDE = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 512, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
HIDDEN, INNER, LAYERS, TOKENS = 1024, 4096, 4, 2048
WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
RECIPES = ("te-delayed", "te-current", "te-blockwise", "te-mxfp8")


def answer(gpu: str = "h100", **settings: object) -> memplan.Estimate:
    setup = memplan.TrainingSetup(
        **{"num_gpus": 1, "engine": "megatron", "seq_len": TOKENS, **settings}  # type: ignore[arg-type]
    )
    return memplan.estimate(memplan.load_model(WIDE), setup, gpu=gpu)


def kept(**settings: object) -> int:
    """Between the passes [bytes]."""
    found = answer(**settings)  # type: ignore[arg-type]
    return record_and_walk(found.model, tape_options(found.setup, found.gpu))[
        1
    ].after_forward.total_bytes


def timed(model: object, gpu: str = "h100", **settings: object) -> StepTime:
    setup = memplan.TrainingSetup(
        **{"num_gpus": 8, "engine": "megatron", "seq_len": 4096, **settings}
    )  # type: ignore[arg-type]
    return time_of(Job.of(memplan.load_model(model), setup, memplan.load_gpu(gpu)))  # type: ignore[arg-type]


def components(found: memplan.Estimate) -> dict[str, int]:
    return dict(found.phases["backward"].components)


def test_codes_are_kept_in_place_of_inputs_and_beside_weights() -> None:
    """Of each layer the inputs of four products, 2 bytes each in 16 bits and one in 8; of its weights a copy by row and one by column."""
    plain, narrow = components(answer()), components(answer(fp8="te-delayed"))
    assert narrow["parameters"] - plain["parameters"] == 2 * WEIGHTS
    # Norms' outputs, and the product of gate and up, are kept by nobody else; attention's output is by attention.
    less = LAYERS * TOKENS * (2 * HIDDEN + INNER)
    more = LAYERS * TOKENS * HIDDEN
    assert kept() - kept(fp8="te-delayed") == less - more
    # A card that multiplies both layouts needs one copy.
    newer = components(answer("b200", fp8="te-delayed"))
    assert newer["parameters"] - plain["parameters"] == WEIGHTS


def test_scales_of_blocks_are_counted() -> None:
    """MXFP8: a byte for 32 both ways; blocks of 128 with fp32 scales, weights in squares."""
    plain = components(answer("b200"))["parameters"]
    micro = components(answer("b200", fp8="te-mxfp8"))["parameters"]
    squares = components(answer("b200", fp8="te-blockwise"))["parameters"]
    assert micro - plain == 2 * WEIGHTS * 33 // 32
    assert squares - plain == 2 * (WEIGHTS + 4 * WEIGHTS // 128**2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_saves_time_where_products_are_large(recipe: str) -> None:
    gpu = "b200" if recipe == "te-mxfp8" else "h100"
    shape = {"gpu": gpu, "tensor_parallel": 8, "sequence_parallel": True, "micro_batch_size": 4}
    plain, narrow = timed("llama-3.1-8b", **shape), timed("llama-3.1-8b", **shape, fp8=recipe)  # type: ignore[arg-type]
    assert 1.15 < plain.expected_s / narrow.expected_s < 2
    # What is gathered is half as much, what is added up as much as before.
    sent, before = (
        next(each.seconds for each in found.shares if each.words.startswith("communication"))
        for found in (narrow, plain)
    )
    assert 0.5 < sent / before < 0.95


def test_a_scale_that_is_not_known_costs_a_pass() -> None:
    known, looked_for = (timed("llama-3.1-8b", fp8=each) for each in ("te-delayed", "te-current"))
    assert 1.01 < looked_for.expected_s / known.expected_s < 1.1


def test_experts_and_pipelines_are_narrow_too() -> None:
    mixture = {"expert_parallel": 8, "micro_batch_size": 2}
    plain, narrow = (
        timed("qwen3-30b-a3b", **mixture, **each) for each in ({}, {"fp8": "te-delayed"})
    )  # type: ignore[arg-type]
    assert narrow.expected_s < plain.expected_s
    stages = {"pipeline_parallel": 2, "gradient_accumulation_steps": 8, "tensor_parallel": 2}
    plain, narrow = (
        timed("llama-3.1-8b", **stages, **each) for each in ({}, {"fp8": "te-delayed"})
    )  # type: ignore[arg-type]
    assert narrow.expected_s < plain.expected_s


def test_what_does_not_multiply_so_is_refused() -> None:
    with pytest.raises(SetupError, match="one of TransformerEngine's recipes"):
        answer(fp8="torchao-tensorwise")
    with pytest.raises(SetupError, match="transformer_impl local multiplies 16 bits"):
        answer(fp8="te-delayed", engine_options={"transformer_impl": "local"})
    odd = {**WIDE, "intermediate_size": 4104}
    setup = memplan.TrainingSetup(engine="megatron", num_gpus=1, fp8="te-delayed")
    with pytest.raises(SetupError, match=r"multiples of 16.*linear_fc2\.weight has 4104"):
        memplan.estimate(memplan.load_model(odd), setup, gpu="h100")
