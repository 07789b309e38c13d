"""FLOPs off the tape against the papers' formulas, family by family."""

from dataclasses import replace
from typing import Any

import pytest

from memplan.compute.flops import FlopsComponent, ScoreCount, StepFlops, count_flops
from memplan.dtypes import DType
from memplan.formulas.flops import megatron_flops, narayanan_flops, torchtitan_flops
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import component_parameters, total_parameters
from memplan.graph.model import record_model
from memplan.model.spec import ModelSpec
from memplan.report.shape import formula_shape
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.kernels import (
    KERNEL_PRESETS,
    AttentionKernel,
    KernelPreset,
    LossKernel,
)
from memplan.training.freezing import FrozenParts

GPT = {
    "model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 2048,
    "vocab_size": 51200,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "vocab_size": 32128,
}  # fmt: skip
BATCH, LENGTH = 2, 2048


def flops_of(
    model: ModelSpec | dict[str, Any], *, scores: ScoreCount = ScoreCount.FULL, **options: Any
) -> StepFlops:
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    given = {"batch_size": BATCH, "seq_len": LENGTH, "target_seq_len": LENGTH, **options}
    given.setdefault("compute", DType.BF16)
    return count_flops(record_model(spec, TapeOptions(**given)), spec, scores=scores)


def parts(found: StepFlops) -> dict[FlopsComponent, tuple[int, int, int]]:
    return {
        each.component: (each.forward, each.backward, each.recomputation)
        for each in found.components
    }


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    "kernels", [KernelPreset.HF, KernelPreset.MEGATRON, KernelPreset.LIGER], ids=lambda k: k.value
)
@pytest.mark.parametrize("autocast", [None, DType.BF16], ids=["bf16", "amp"])
def test_gpt(share: float, kernels: KernelPreset, autocast: DType | None) -> None:
    """``(3 + gamma)·24bsh²L(1 + s/(6h)) + 6bshV``, exactly."""
    found = flops_of(
        GPT,
        checkpointed_layers=share,
        kernels=KERNEL_PRESETS[kernels],
        autocast=autocast,
        compute=DType.BF16 if autocast is None else DType.FP32,
    )

    assert found.total == narayanan_flops(
        num_layers=24,
        hidden_size=1024,
        vocab_size=51200,
        seq_len=LENGTH,
        batch_size=BATCH,
        recomputed_share=share,
    )


def test_gpt_components() -> None:
    """QKV ``6bsh²``, scores ``2bs²h``, values ``2bs²h``, projection ``2bsh²``, up and down ``8bsh²`` each."""
    b, s, h, layers, v = BATCH, LENGTH, 1024, 24, 51200
    forward = {
        FlopsComponent.PROJECTIONS: layers * 6 * b * s * h**2,
        FlopsComponent.SCORES: layers * 2 * b * s**2 * h,
        FlopsComponent.VALUES: layers * 2 * b * s**2 * h,
        FlopsComponent.OUTPUT_PROJECTION: layers * 2 * b * s * h**2,
        FlopsComponent.FEED_FORWARD_UP: layers * 8 * b * s * h**2,
        FlopsComponent.FEED_FORWARD_DOWN: layers * 8 * b * s * h**2,
        FlopsComponent.LOGITS: 2 * b * s * h * v,
    }

    assert parts(flops_of(GPT)) == {
        component: (size, 2 * size, 0) for component, size in forward.items()
    }


@pytest.mark.parametrize("attention", AttentionKernel)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=lambda config: config["model_type"])
def test_the_parts_are_the_same_whatever_the_kernel(
    config: dict[str, Any], attention: AttentionKernel
) -> None:
    found = parts(
        flops_of(config, kernels=replace(KERNEL_PRESETS[KernelPreset.HF], attention=attention))
    )
    assert found == parts(flops_of(config))


def test_what_mixes_tokens_without_a_softmax_is_a_part_of_its_own() -> None:
    found = parts(flops_of({"model_type": "qwen3_next", "num_hidden_layers": 4}, seq_len=128))
    assert found[FlopsComponent.TOKEN_MIXING][0] > 0
    attended = flops_of(
        {"model_type": "qwen3_next", "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
        seq_len=128,
    )
    scores = parts(attended)[FlopsComponent.SCORES][0]
    assert found[FlopsComponent.SCORES][0] * 4 == scores


def test_causal_halves_the_scores_only() -> None:
    full, causal = parts(flops_of(GPT)), parts(flops_of(GPT, scores=ScoreCount.CAUSAL))

    for component, (forward, backward, _) in full.items():
        half = 2 if component in (FlopsComponent.SCORES, FlopsComponent.VALUES) else 1
        assert causal[component] == (forward // half, backward // half, 0)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=lambda config: config["model_type"])
def test_megatron_counts_the_same(config: dict[str, Any]) -> None:
    model = load_model(config)
    found = flops_of(model, scores=ScoreCount.CAUSAL)

    formula = megatron_flops(formula_shape(model), seq_len=LENGTH, batch_size=BATCH)
    assert found.model == formula


def test_mixture_of_experts() -> None:
    """Megatron's count and the router, which Megatron ignores: ``6ThE`` a layer."""
    model = load_model(MIXTRAL)
    found = flops_of(model, scores=ScoreCount.CAUSAL)

    tokens = BATCH * LENGTH
    router = 6 * tokens * 512 * 8 * 3
    assert sum(parts(found)[FlopsComponent.ROUTER]) == router
    assert sum(parts(found)[FlopsComponent.EXPERTS]) == 3 * 3 * 6 * tokens * 512 * 1024 * 2
    formula = megatron_flops(formula_shape(model), seq_len=LENGTH, batch_size=BATCH)
    assert found.model == formula + router


def test_torchtitan_counts_the_same_but_for_norms() -> None:
    model = load_model(LLAMA)
    tape = record_model(model, TapeOptions())
    params = total_parameters(tape)

    formula = torchtitan_flops(
        params,
        embedding_params=component_parameters(tape)["embeddings"],
        tokens=BATCH * LENGTH,
        seq_len=LENGTH,
        shape=formula_shape(model),
    )

    norms = component_parameters(tape)["norms"]
    assert flops_of(model).model == formula - 6 * BATCH * LENGTH * norms


def test_encoder_decoder() -> None:
    """Cross-attention: keys of the encoder's length, queries of the decoder's; never halved."""
    source, target = 1024, 256
    found = parts(flops_of(T5, seq_len=source, target_seq_len=target, scores=ScoreCount.CAUSAL))
    b, h, layers = BATCH, 512, 6

    assert found[FlopsComponent.CROSS_SCORES][0] == layers * 4 * b * source * target * h
    assert found[FlopsComponent.CROSS_PROJECTIONS][0] == layers * 4 * b * (source + target) * h**2
    encoder, decoder = source**2, target**2 // 2
    for each in (FlopsComponent.SCORES, FlopsComponent.VALUES):
        assert found[each][0] == layers * 2 * b * (encoder + decoder) * h
    assert found[FlopsComponent.LOGITS][0] == 2 * b * target * h * 32128


def test_window() -> None:
    """Within a window of w a causal layer has ``sw - w²/2`` scores for each head and number."""
    window = 512
    model = load_model({**LLAMA, "model_type": "mistral", "sliding_window": window})
    found = parts(flops_of(model, scores=ScoreCount.CAUSAL))

    area = LENGTH * window - window**2 // 2
    for each in (FlopsComponent.SCORES, FlopsComponent.VALUES):
        assert found[each][0] == 2 * BATCH * area * 1024 * 4


def test_encoders_are_never_halved() -> None:
    bert = load_model("bert-base-uncased")
    full = flops_of(bert, seq_len=512)

    assert flops_of(bert, seq_len=512, scores=ScoreCount.CAUSAL).total == full.total


def lightning_flops(block: int, heads: int, size: int) -> tuple[int, int]:
    """Of blocks of ``B`` tokens, forward and backward: ``2bad(2B² + 2Bd)`` each.

    Its own pairs twice, what came before, and what it adds to that. The first block's sum before it is
    zeros, which want no gradient; what the last one adds is read by nobody.
    """
    unit, count = 2 * BATCH * heads * size, LENGTH // block
    carried = unit * block * size
    forward = count * (2 * unit * block**2 + 2 * carried)
    return forward, 2 * forward - carried - 2 * carried


LIGHTNING = {
    "model_type": "minimax", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 128, "vocab_size": 1000,
    "block_size": 256, "layer_types": ["linear_attention"], "num_local_experts": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8,
    "intermediate_size": 1024, "vocab_size": 1000, "q_lora_rank": 128, "kv_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 48, "first_k_dense_replace": 1,
}  # fmt: skip
PAIRS = 2 * BATCH * LENGTH**2
"""A multiply-add for every query with every key, of one head and number."""
BY_HAND = {
    "latent": (LATENT, PAIRS * 8 * 96, PAIRS * 8 * 48),
    "grouped": (LLAMA, 4 * PAIRS * 1024, 4 * PAIRS * 1024),
}  # fmt: skip
"""Queries with keys, scores with values: ``2bs²ad`` of each layer."""


@pytest.mark.parametrize("attention", [AttentionKernel.EAGER, AttentionKernel.SDPA], ids=str)
@pytest.mark.parametrize("scores", ScoreCount, ids=str)
@pytest.mark.parametrize("case", BY_HAND)
def test_attention_costs_what_its_equation_says(
    case: str, scores: ScoreCount, attention: AttentionKernel
) -> None:
    """Whatever the kernel; a causal mask lets half of it through, and backward is twice that."""
    config, *both = BY_HAND[case]
    kernels = replace(KERNEL_PRESETS[KernelPreset.HF], attention=attention)
    found = parts(flops_of(config, scores=scores, kernels=kernels))
    share = 2 if scores is ScoreCount.CAUSAL else 1
    for each, count in zip((FlopsComponent.SCORES, FlopsComponent.VALUES), both, strict=True):
        assert found[each] == (count // share, 2 * count // share, 0)


def test_lightning_attention_costs_what_its_blocks_say() -> None:
    found = parts(flops_of(LIGHTNING))[FlopsComponent.TOKEN_MIXING]
    assert found[:2] == lightning_flops(block=256, heads=4, size=64)


@pytest.mark.parametrize(
    "loss",
    [
        LossKernel.EAGER, LossKernel.FUSED_LINEAR, LossKernel.UNSLOTH_FUSED, LossKernel.CUT,
        LossKernel.TILED, LossKernel.TILED_GRADIENTS,
    ],
    ids=lambda loss: loss.value,
)  # fmt: skip
def test_logits_cost_the_same_whatever_the_loss(loss: LossKernel) -> None:
    """``2bshV`` forward: a kernel that never has them all makes each of them once."""
    kernels = replace(KERNEL_PRESETS[KernelPreset.HF], loss=loss, loss_tiles=4)
    found = parts(flops_of(LLAMA, kernels=kernels))[FlopsComponent.LOGITS]
    assert found[0] == 2 * BATCH * LENGTH * 1024 * 32000


def test_frozen_layers_need_half_of_backward() -> None:
    """Weights of the last layer alone: the others before it need no backward pass at all."""
    trained = parts(flops_of(LLAMA, freeze=FrozenParts.parse("embeddings,layers.0-2")))

    whole = parts(flops_of(LLAMA))
    for each in (FlopsComponent.FEED_FORWARD_UP, FlopsComponent.FEED_FORWARD_DOWN):
        assert trained[each] == (whole[each][0], whole[each][1] // 4, 0)
    assert (
        whole[FlopsComponent.FEED_FORWARD_UP][0] == 2 * whole[FlopsComponent.FEED_FORWARD_DOWN][0]
    )


def test_frozen_layers_above_a_trained_embedding_pass_gradients_through() -> None:
    frozen = parts(flops_of(LLAMA, freeze=FrozenParts.parse("layers.0-3")))

    whole = parts(flops_of(LLAMA))
    for each in (FlopsComponent.FEED_FORWARD_UP, FlopsComponent.FEED_FORWARD_DOWN):
        assert frozen[each] == (whole[each][0], whole[each][0], 0)
    for each in (FlopsComponent.SCORES, FlopsComponent.VALUES):
        assert frozen[each][1] == 2 * frozen[each][0]  # no weights in it


def test_megatron_selective_recomputes_core_attention() -> None:
    found = parts(flops_of(GPT, kernels=KERNEL_PRESETS[KernelPreset.MEGATRON], selective=True))

    again = {component for component, figures in found.items() if figures[2]}
    assert again == {FlopsComponent.SCORES, FlopsComponent.VALUES}
    assert all(found[each][2] == found[each][0] for each in again)


def test_torchtitan_selective_recomputes_every_other_product() -> None:
    """k, o and up of q, k, v, o, gate, up, down."""
    found = parts(
        flops_of(
            LLAMA,
            kernels=KERNEL_PRESETS[KernelPreset.TORCHTITAN],
            selective=True,
            checkpointed_layers=1.0,
        )
    )
    tokens, h, kv, inner = BATCH * LENGTH, 1024, 256, 2816

    assert found[FlopsComponent.PROJECTIONS][2] == 4 * 2 * tokens * h * kv
    assert found[FlopsComponent.OUTPUT_PROJECTION][2] == 4 * 2 * tokens * h * h
    assert found[FlopsComponent.FEED_FORWARD_UP][2] == 4 * 2 * tokens * h * inner
    assert found[FlopsComponent.FEED_FORWARD_DOWN][2] == 0
    assert found[FlopsComponent.SCORES][2] == 0


def test_what_the_gpu_really_runs() -> None:
    """torch stops before a Llama layer's last product; flash attention multiplies once more."""
    found = flops_of(LLAMA, checkpointed_layers=1.0)
    tokens = BATCH * LENGTH

    assert found.early_stopped == 4 * 2 * tokens * 2816 * 1024
    assert found.kernel_recomputation == 4 * 2 * BATCH * LENGTH**2 * 1024
    assert found.executed == found.total - found.early_stopped + found.kernel_recomputation


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "gpt2", "gemma-2-2b", "mixtral-8x7b", "t5-small", "bert-tiny"]
)
def test_more_tokens_never_cost_less(name: str) -> None:
    model = load_model(name)
    once, twice = (
        flops_of(model, batch_size=batch, seq_len=256, target_seq_len=256) for batch in (1, 2)
    )

    assert twice.total == 2 * once.total
    longer = flops_of(model, batch_size=1, seq_len=512, target_seq_len=512)
    assert longer.total >= twice.total
    assert longer.num_tokens == twice.num_tokens


def test_estimate_has_them() -> None:
    from memplan.estimator import estimate
    from memplan.training.setup import TrainingSetup

    model = load_model(GPT)
    setup = TrainingSetup(micro_batch_size=BATCH, seq_len=LENGTH, precision="bf16")  # type: ignore[arg-type]

    assert estimate(model, setup).flops.total == flops_of(model).total
    assert estimate(model, replace(setup, num_gpus=1)).flops.scores is ScoreCount.FULL


DECODERS = (
    "gpt2", "pythia-160m", "opt-125m", "bloom-560m", "llama-3.2-1b", "mistral-7b", "qwen2-0.5b",
    "qwen3-0.6b", "gemma-2b", "gemma-2-2b", "phi-3-mini-4k", "mixtral-8x7b", "qwen1.5-moe-a2.7b",
    "qwen3-30b-a3b",
)  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_every_matrix_is_multiplied_once_by_every_token(name: str) -> None:
    """Forward, scores apart: ``2T`` times the active matrices of the layers and the output's."""
    model = load_model(name)
    tape = record_model(model, TapeOptions(batch_size=1, seq_len=64, target_seq_len=64))
    matrices = sum(
        parameter.active_numel * segment.num_copies
        for segment in tape.segments
        if segment.name.endswith(".layers")
        for parameter in segment.parameters
        if len(parameter.shape) > 1
    )

    found = count_flops(tape, model)

    scores = sum(parts(found)[each][0] for each in (FlopsComponent.SCORES, FlopsComponent.VALUES))
    logits = 2 * 64 * model.hidden_size * model.vocab_size
    assert found.forward - scores == 2 * 64 * matrices + logits
    assert found.backward == 2 * found.forward


def test_a_model_whose_operations_are_not_written_down_is_refused() -> None:
    from memplan.errors import UnsupportedOperationError
    from memplan.estimator.flops import estimate_flops
    from memplan.training.setup import TrainingSetup

    model = load_model({"model_type": "swinv2", "architectures": ["Swinv2ForMaskedImageModeling"]})
    assert model.activations_left_out
    with pytest.raises(UnsupportedOperationError, match="swinv2: its operations are not written"):
        estimate_flops(model, TrainingSetup())


def test_an_indexer_has_no_backward_pass() -> None:
    """DeepSeek-V3.2's indexer only chooses: forward as any product, backward nothing."""
    sizes = {
        "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 1000,
        "intermediate_size": 1024, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 48, "first_k_dense_replace": 1,
    }  # fmt: skip
    indexer = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 128}
    plain, chosen = (
        flops_of(load_model({"model_type": kind, **sizes, **more}))
        for kind, more in (("deepseek_v3", {}), ("deepseek_v32", indexer))
    )

    assert chosen.forward > plain.forward
    assert chosen.backward == plain.backward
