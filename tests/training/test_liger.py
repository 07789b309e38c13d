"""Liger's kernels by model type: what a setup is resolved to, and what the answer says."""

from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.graph.losses.tasks import unsloth_chunk_rows
from memplan.training.choices_of_kernels.kernels import LossKernel, NormKernel
from memplan.training.choices_of_kernels.liger import LIGER_MODELS, liger_overrides
from memplan.training.choices_of_kernels.losses import LOSS_FORMS
from memplan.training.setup import TrainingSetup

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip


def small(kind: str) -> Any:
    return memplan.load_model({"model_type": kind, **SMALL})


def test_every_loss_has_a_form() -> None:
    assert set(LOSS_FORMS) == set(LossKernel)
    assert all(form.source for form in LOSS_FORMS.values())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("llama", {}, id="all kernels"),
        pytest.param("gemma2", {"norm": "liger_apart"}, id="norms before the residual"),
        pytest.param("glm4", {"norm": "liger_apart", "rotary": "eager"}, id="no rotary kernel"),
        pytest.param("gpt_oss", {"mlp": "eager"}, id="experts of its own"),
        pytest.param("granite", {"loss": "liger"}, id="scaled logits"),
        pytest.param(
            "gpt2", {"norm": "eager", "mlp": "eager", "rotary": "eager", "loss": "eager"},
            id="not known",
        ),
    ],
)  # fmt: skip
def test_by_model_type(family: str, overrides: dict[str, str]) -> None:
    assert {name: each.value for name, each in liger_overrides(family).items()} == overrides
    setup = TrainingSetup(kernels="liger").resolve(family=family)
    for name, value in overrides.items():
        assert getattr(setup, name).value == value


def test_what_is_asked_for_stays() -> None:
    setup = TrainingSetup(kernels="liger", norm="fused").resolve(family="gpt2")
    assert setup.norm is NormKernel.FUSED


def test_a_model_that_liger_does_not_know_is_named() -> None:
    found = memplan.estimate(small("stablelm"), TrainingSetup(kernels="liger", seq_len=128))
    assert any("Liger 0.8.5 has no kernels for stablelm" in note for note in found.notes)
    plain = memplan.estimate(small("stablelm"), TrainingSetup(seq_len=128))
    assert found.peak_bytes == plain.peak_bytes
    assert "stablelm" not in LIGER_MODELS


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("loss", "cce", "Did you mean 'cut'?"),
        ("loss", "fused_linear_cross_entropy", "Did you mean 'fused_linear'?"),
        ("loss", "cewithchunkedoutputloss", "Did you mean 'torchtune'?"),
        ("norm", "unsloth", "Did you mean 'liger'"),
        ("mlp", "swiglu", "Did you mean 'fused'?"),
        ("rotary", "compelx", "Did you mean 'complex'?"),
        ("attention", "fa3", "Did you mean 'flash3'?"),
        ("packing", "bfd", "Did you mean 'padding_free'?"),
        ("packing", "sample_packing", "Did you mean 'documents'?"),
    ],
)
def test_other_names_are_refused_with_the_nearest(field: str, value: str, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        TrainingSetup(**{field: value})
    assert words in str(caught.value)


def test_unsloth() -> None:
    """Its norms write over gradients as Liger's do; its loss keeps both gradients and no logits."""
    setup = TrainingSetup(kernels="unsloth", engine="ddp", precision="bf16", seq_len=512)
    found = memplan.estimate(small("llama"), setup, gpu="h100-80gb")
    plain = memplan.estimate(small("llama"), replace(setup, kernels="hf"), gpu="h100-80gb")
    assert found.activations_bytes < plain.activations_bytes
    assert any("upper bounds" in note for note in found.notes)


@pytest.mark.parametrize(
    ("tokens", "fixed_gib", "rows"),
    [
        pytest.param(512, 0, 512, id="one piece is enough"),
        pytest.param(16_384, 2, 1024, id="half of the budget is taken"),
        pytest.param(16_384, 8, 2048, id="more than the budget is taken: it is left whole"),
    ],
)
def test_unsloth_chunk_rows(tokens: int, fixed_gib: int, rows: int) -> None:
    fixed_bytes = fixed_gib * 2**30
    assert unsloth_chunk_rows(tokens, vocab_size=128_256, fixed_bytes=fixed_bytes) == rows


# -- packing --------------------------------------------------------------------------------------


def packed(attention: str, packing: str, **fields: Any) -> Any:
    setup = TrainingSetup(
        engine="ddp", precision="bf16", attention=attention, packing=packing, **fields
    )
    return memplan.estimate(small("llama"), setup, gpu="h100-80gb")


def test_flash_attention_needs_no_mask() -> None:
    """One row of all tokens keeps what rows of their own do, but for the tables of positions."""
    sizes = {"micro_batch_size": 4, "seq_len": 512}
    padded = packed("flash", "none", **sizes)
    flat = packed("flash", "padding_free", **sizes)
    head_dim = SMALL["hidden_size"] // SMALL["num_attention_heads"]
    tables = 2 * (4 - 1) * 512 * head_dim * 2
    assert flat.activations_bytes - padded.activations_bytes == pytest.approx(tables, abs=1300)
    assert any("one row of 2,048 tokens" in each for each in flat.assumptions)


def test_a_mask_of_every_pair_grows_with_the_square() -> None:
    """sdpa is given one boolean for each pair of tokens in the row, and keeps a bias in each layer."""
    one, two = (
        packed("sdpa", "padding_free", micro_batch_size=size, seq_len=1024).activations_bytes
        - packed("flash", "padding_free", micro_batch_size=size, seq_len=1024).activations_bytes
        for size in (2, 4)
    )
    assert two / one == pytest.approx(4)


@pytest.mark.parametrize(
    ("model", "packing"), [("bert-base", "documents"), ("t5-small", "padding_free")]
)
def test_packing_is_for_decoders(model: str, packing: str) -> None:
    with pytest.raises(SetupError, match=r"packing: .* is for decoders"):
        memplan.estimate(memplan.load_model(model), TrainingSetup(packing=packing))


def test_flash3_is_for_hopper() -> None:
    model = small("llama")
    setup = TrainingSetup(attention="flash3", precision="bf16", engine="ddp")
    with pytest.raises(SetupError, match=r"flash3 needs compute capability 9\.0"):
        memplan.estimate(model, setup, gpu="a100-80gb")
    assert memplan.estimate(model, setup, gpu="h100-80gb").peak_bytes


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(64, 64), (100, 128), (136, 192), (160, 192), (200, 256), (256, 256)]
)
def test_flash_pads_its_accumulator(head_dim: int, padded: int) -> None:
    """What torch 2.13's CUDA build allocates for 1024 rows of 2 x 8 heads."""
    from memplan.dtypes import DType
    from memplan.graph.attention.head_layout import Shape
    from memplan.graph.attention.scratch import flash_backward_scratch
    from memplan.graph.core.options import TapeOptions
    from memplan.graph.core.tape import Tape
    from memplan.model.attention import AttentionSpec

    spec = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=head_dim)
    out = Tape(TapeOptions()).tensor(1, DType.BF16)
    _, accumulator = flash_backward_scratch(Shape(2, 1024, 1024, spec), out)
    assert accumulator == 2 * 8 * 1024 * 4 * padded
