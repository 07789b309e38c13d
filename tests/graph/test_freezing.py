"""Frozen parameters: no gradient, no state, and nothing kept that only they needed."""

from typing import Any

import pytest

from memplan.api import estimate
from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.training.freezing import FrozenParts
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

MODEL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_hidden_layers": 6, "vocab_size": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
TABLE = 4096 * 512


def answer(freeze: str, **settings: object):
    setup = TrainingSetup(
        precision="bf16", seq_len=256, freeze=freeze, kernel_scratch=False, **settings
    )
    return estimate(MODEL, setup)


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        ("", 2 * TABLE + 6 * LAYER + 512),
        ("embeddings", TABLE + 6 * LAYER + 512),
        ("embeddings,layers.0-3", TABLE + 2 * LAYER + 512),
        ("layers.2", 2 * TABLE + 5 * LAYER + 512),
        ("layers,norm", 2 * TABLE),
        ("embeddings,layers,norm", TABLE),
        ("head", TABLE + 6 * LAYER + 512),
        ("all but .*", 2 * TABLE + 6 * LAYER + 512),
        ("all but model[.]layers[.](0|3)[.] lm_head", TABLE + 2 * LAYER),
        ("all but model[.]layers[.][2-4][.]mlp[.]down_proj model[.]norm", 3 * 512 * 1024 + 512),
    ],
)
def test_trained_parameters(freeze: str, trained: int) -> None:
    assert answer(freeze).trainable_params == trained


def test_nothing_is_kept_below_the_first_trained_layer() -> None:
    whole = answer("").activations_bytes
    half = answer("embeddings,layers.0-2").activations_bytes
    head_only = answer("embeddings,layers,norm").activations_bytes
    assert head_only < half < whole
    logits_and_their_input = 256 * 4096 * 4 + 256 * 512 * 2
    assert head_only <= logits_and_their_input + 256 * 8 + 2048


def test_frozen_layers_above_trained_ones_pass_gradients_on() -> None:
    """Their products still need the weights, but no longer their inputs."""
    whole = answer("").activations_bytes
    frozen_top = answer("layers.3-5").activations_bytes
    assert answer("embeddings,layers.0-2").activations_bytes < frozen_top < whole


def test_gradients_and_states_follow_what_is_trained() -> None:
    step = answer("embeddings,layers.0-2").phases["step"].components
    trained = TABLE + 3 * LAYER + 512
    assert step["gradients"] == 2 * trained
    assert step["optimizer_states"] >= 2 * 2 * trained


@pytest.mark.parametrize("text", ["layer.0-3", "layers.3-1", "layers.x", "everything"])
def test_bad_parts(text: str) -> None:
    with pytest.raises(SetupError, match="freeze"):
        FrozenParts.parse(text)


def test_parts_are_written_as_they_are_read() -> None:
    text = "embeddings,head,layers.0-7"
    assert str(FrozenParts.parse(text)) == text


def test_layers_below_keep_nothing_for_a_second_run() -> None:
    """Without a graph nothing holds what selective checkpointing has set aside."""
    frozen = "embeddings,layers.0-4"
    whole = answer(frozen, engine="fsdp").activations_bytes
    for checkpointing in ("selective", "full"):
        found = answer(frozen, engine="fsdp", checkpointing=checkpointing)
        assert found.activations_bytes <= whole


@pytest.mark.parametrize("engine", [{}, {"zero_stage": 1, "num_gpus": 4}, {"engine": "fsdp"}])
def test_everything_frozen_is_refused(engine: dict[str, Any]) -> None:
    whole = TrainingSetup(freeze="embeddings,layers,norm,head", **engine)
    with pytest.raises(SetupError, match="leaves nothing of llama to train; leave a part out"):
        estimate(MODEL, whole)
    adapted = TrainingSetup(freeze="layers", adapter={"lora": 4}, **engine)
    with pytest.raises(SetupError, match="an adapter's weights in these parts"):
        estimate(MODEL, adapted)


@pytest.mark.parametrize(
    "engine", [{}, {"engine": "fsdp", "num_gpus": 4}, {"engine": "fsdp1", "num_gpus": 4}]
)
def test_parts_by_their_names_are_those_parts(engine: dict[str, Any]) -> None:
    """The same bytes, whichever way whole parts are named."""
    pairs = {
        "embeddings,norm,head": "all but model[.]layers", "": "all but .*",
        "layers.0-3": "all but model[.]layers[.][45] model[.](embed|norm) lm_head",
    }  # fmt: skip
    for parts, names in pairs.items():
        one, other = answer(parts, **engine), answer(names, **engine)
        assert (one.account, one.required_bytes) == (other.account, other.required_bytes)


SPECTRUM = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "trained", "backward", "step"),
    [
        (".*", 106_578_944, 1_124_649_716, 869_679_664),
        ("model[.]layers[.](3|4)[.]mlp[.]down_proj model[.]layers[.]6[.]self_attn[.]q_proj lm_head", 15_007_744, 532_625_784, 320_252_180),
        ("model[.]layers[.][0-7][.]mlp[.]up_proj model[.]layers[.][2-3][.]input_layernorm", 23_070_720, 668_907_992, 368_630_060),
        ("model[.]embed model[.]layers[.]1[.]self_attn[.](k|o)_proj", 9_502_720, 621_001_172, 287_222_032),
    ],
)  # fmt: skip
def test_parameters_that_alone_are_trained_against_torch(
    names: str, trained: int, backward: int, step: int
) -> None:
    """Bytes requested of PyTorch 2.13's CUDA build on a pretended A100, of the fourth of four steps; ours are rounded up."""
    setup = TrainingSetup(
        freeze=f"all but {names}", precision="bf16", seq_len=512, micro_batch_size=2
    )  # type: ignore[arg-type]
    found = estimate(SPECTRUM, setup, gpu="a100")
    assert found.trainable_params == trained
    for phase, truth in (("backward", backward), ("step", step)):
        assert 0 <= found.phases[phase].peak_bytes - truth < 2**16


def test_names_that_the_model_does_not_have_are_told() -> None:
    found = answer("all but lm_head model[.]layers[.]1[.]block_sparse_moe")
    assert any(
        "no parameter model[.]layers[.]1[.]block_sparse_moe" in each for each in found.assumptions
    )
    with pytest.raises(SetupError, match="no regular expression"):
        answer("all but (")
    assert str(FrozenParts.parse("all but a b")) == "all but a b"


def test_frozen_first_layers_keep_their_inputs_where_transformers_checkpoints() -> None:
    """Bytes requested of PyTorch 2.13's CUDA build on a pretended A100, of the third of three steps; ours are rounded up.

    transformers 5.23 makes what comes out of the input embeddings require a gradient, so that the layers'
    inputs are kept. FSDP's layers are wrapped from outside, and frozen ones keep nothing.
    """
    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 8000, "tie_word_embeddings": False,
    }  # fmt: skip
    setup = TrainingSetup(
        freeze="embeddings,layers.0-1", precision="bf16", seq_len=1024, micro_batch_size=2,
        checkpointing="full",
    )  # type: ignore[arg-type]  # fmt: skip
    phases = estimate(config, setup, gpu="a100").phases
    for phase, truth in (("forward", 281_103_592), ("backward", 313_838_808)):
        assert 0 <= phases[phase].peak_bytes - truth < 2**15
    wrapped = estimate(config, replace(setup, engine=Engine.FSDP), gpu="a100").phases
    kept = [each["forward"].components["activations"] for each in (phases, wrapped)]
    assert kept[0] - kept[1] == 2 * (2 * 1024 * 512 * 2)
