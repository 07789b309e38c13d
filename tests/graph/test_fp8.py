"""Linear layers in fewer bits, beside runs of torchao 0.18 on PyTorch 2.13's CUDA build.

``data/fp8.json`` holds what those runs asked for: peaks of the last of three steps, the head in 16 bits.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Package, Fp8Recipe

RUNS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "fp8.json").read_text()
)


def answer(config: Any, **settings: Any) -> memplan.Estimate:
    setup = memplan.TrainingSetup(**settings)
    return memplan.estimate(memplan.load_model(config, task="causal-lm"), setup, gpu="h100-80gb")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['name']} {run['precision']}")
def test_peaks_are_those_of_torchao(run: dict[str, Any]) -> None:
    found = answer(
        run["config"],
        precision=run["precision"],
        micro_batch_size=run["micro_batch_size"],
        seq_len=run["seq_len"],
        checkpointing=run["checkpointing"],
        fp8=run["recipe"],
        compile=run["compile"],
    )
    assert found.peak_bytes == pytest.approx(run["requested_bytes"], rel=3e-5)
    # A run's own peaks hold whole blocks, of which the last may be larger than what was asked for.
    assert found.phases["forward"].peak_bytes == pytest.approx(run["forward_bytes"], rel=3e-3)
    assert found.phases["backward"].peak_bytes == pytest.approx(run["backward_bytes"], rel=3e-3)
    assert found.reserved_bytes == pytest.approx(run["reserved_bytes"], rel=0.011)


WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 4096, "vocab_size": 512, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_transformer_engine_keeps_codes_in_place_of_inputs() -> None:
    """A Llama layer of width H and feed-forward F: what each product keeps, by hand.

    Of 2 (3H + H + H + F) bytes of inputs a token, q, k and v share theirs, and so do gate and up:
    in 16 bits 2 (H + H + F) are kept that norm, attention and activation do not keep anyway; in 8,
    7 inputs of a byte each, q's, k's and v's apart.
    """
    plain = answer(WIDE, precision="bf16", seq_len=2048)
    narrow = answer(WIDE, precision="bf16", seq_len=2048, fp8="te-delayed")
    tokens, hidden, inner, layers = 2048, 1024, 4096, 4
    weights = 4 * hidden * hidden + 3 * hidden * inner
    # Both norms' outputs and the product of gate and up are kept by nobody else; attention's output is.
    less = 2 * tokens * (2 * hidden + inner)
    more = tokens * (3 * hidden + hidden + 2 * hidden + inner) + 2 * weights
    # The head is replaced too: its input is that of nobody else, and its weight is there twice.
    head_less, head_more = 2 * tokens * hidden, tokens * hidden + 2 * 512 * hidden
    expected = layers * (more - less) + head_more - head_less

    def held(found: memplan.Estimate) -> int:
        tape, passes = record_and_walk(found.model, tape_options(found.setup, found.gpu))
        assert tape.options.fp8 is found.setup.fp8
        return passes.after_forward.total_bytes

    assert held(narrow) - held(plain) == expected


@pytest.mark.parametrize("recipe", ["torchao-tensorwise", "torchao-rowwise"])
def test_codes_are_multiplied_as_often_as_what_they_stand_for(recipe: str) -> None:
    def flops(**settings: Any) -> int:
        found = answer(WIDE, precision="bf16", seq_len=512, **settings)
        tape, _ = record_and_walk(found.model, tape_options(found.setup, found.gpu))
        return sum(
            each.flops * segment.repeat for segment in tape.segments for each in segment.operations
        )

    assert flops(fp8=recipe) == flops()


def test_fsdp2_casts_weights_again_and_gathers_codes_where_asked() -> None:
    wide = {"num_gpus": 8, "engine": "fsdp", "seq_len": 512}
    plain = answer(WIDE, **wide, fp8="torchao-tensorwise")
    gathered = answer(
        WIDE,
        **wide,
        fp8="torchao-tensorwise",
        engine_options={"enable_fsdp_float8_all_gather": True},
    )

    def gathered_bytes(found: memplan.Estimate) -> int:
        return found.phases["backward"].components["gathered_parameters"]

    assert 0 < gathered_bytes(gathered) < gathered_bytes(plain)


def test_recipes_that_cannot_be_are_refused_with_what_can() -> None:
    with pytest.raises(SetupError, match="take bf16"):
        memplan.TrainingSetup(precision="fp32", fp8="te-delayed")
    with pytest.raises(SetupError, match="stages 0 to 2"):
        memplan.TrainingSetup(num_gpus=8, engine="deepspeed", zero_stage=3, fp8="te-delayed")
    with pytest.raises(SetupError, match="torchao-tensorwise"):
        memplan.TrainingSetup(fp8="tensorwise")
    with pytest.raises(SetupError, match="with a recipe of fp8"):
        memplan.TrainingSetup(precision="fp8")
    with pytest.raises(SetupError, match="torchao-tensorwise alone"):
        answer(
            WIDE, num_gpus=8, engine="fsdp", fp8="torchao-rowwise",
            engine_options={"enable_fsdp_float8_all_gather": True},
        )  # fmt: skip


def test_a_card_that_cannot_is_refused() -> None:
    model = memplan.load_model(WIDE)
    setup = memplan.TrainingSetup(fp8="te-mxfp8", seq_len=128)
    with pytest.raises(SetupError, match=r"capability 10\.0, and h100-sxm-80gb has 9\.0"):
        memplan.estimate(model, setup, gpu="h100-80gb")
    assert memplan.estimate(model, setup, gpu="b200").peak_bytes


def test_every_recipe_has_a_row() -> None:
    assert set(FP8_RECIPES) == set(Fp8Recipe) - {Fp8Recipe.NONE}
    assert {each.package for each in FP8_RECIPES.values()} == set(Fp8Package)


@pytest.mark.parametrize("recipe", [each for each in FP8_RECIPES if each is not Fp8Recipe.NONE])
def test_the_output_matrix_is_one_of_transformer_engines_modules_alone(recipe: Fp8Recipe) -> None:
    """accelerate 1.15 replaces every ``nn.Linear`` (``convert_model``), torchtitan all but ``output`` (``filter_fqns``)."""
    found = FP8_RECIPES[recipe]
    assert found.converts_head == (found.package is Fp8Package.TRANSFORMER_ENGINE)
