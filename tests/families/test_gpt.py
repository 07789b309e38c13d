"""Decoders from before Llama: counts, what sets the types apart, what a training step holds."""

from collections.abc import Mapping

import pytest

from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.memory.step import StepWalk
from memplan.model.attention import AttentionSpec, Projection
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels
from tests.plain_step import plain_step


def read(config: Mapping[str, object], task: Task | None = None) -> ModelSpec:
    return read_model(config, source="config.json", name="x", defaults=class_defaults(), task=task)


def layer_of(config: Mapping[str, object]) -> LayerSpec:
    return read(config).stacks[0].runs[0].layer


def attention_of(config: Mapping[str, object]) -> AttentionSpec:
    found = layer_of(config).attention
    assert isinstance(found, AttentionSpec)
    return found


def feed_forward_of(config: Mapping[str, object]) -> FeedForwardSpec:
    found = layer_of(config).feed_forward
    assert isinstance(found, FeedForwardSpec)
    return found


# Sizes from the models' configs; counts from transformers 5.23: total, base model, largest layer.
@pytest.mark.parametrize(
    ("config", "total", "base", "largest"),
    [
        pytest.param(
            {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48},
            1_557_611_200, 1_557_611_200, 80_411_200, id="gpt2-xl",
        ),
        pytest.param({"model_type": "gpt2"}, 124_439_808, 124_439_808, 38_597_376, id="gpt2"),
        pytest.param(
            {"model_type": "openai-gpt"}, 116_534_784, 116_534_784, 31_087_104, id="openai-gpt"
        ),
        pytest.param(
            {"model_type": "gpt_bigcode", "vocab_size": 49152, "n_embd": 4096, "n_head": 32,
             "n_layer": 42, "n_inner": 16384, "n_positions": 8192},
            7_327_263_232, 7_327_263_232, 201_326_592, id="starcoderbase-7b",
        ),
        pytest.param(
            {"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12,
             "attention_types": [[["global", "local"], 6]]},
            125_198_592, 125_198_592, 38_597_376, id="gpt-neo-125m",
        ),
        pytest.param(
            {"model_type": "gptj"}, 6_050_882_784, 5_844_393_984, 206_488_800, id="gpt-j-6b"
        ),
        pytest.param(
            {"model_type": "codegen", "vocab_size": 51200, "n_embd": 1024, "n_layer": 20,
             "rotary_dim": 32},
            356_712_448, 304_232_448, 52_480_000, id="codegen-350m",
        ),
        pytest.param(
            {"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
             "num_attention_heads": 16, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
            331_196_416, 331_196_416, 25_739_264, id="opt-350m",
        ),
        pytest.param({"model_type": "opt"}, 125_239_296, 125_239_296, 38_608_896, id="opt-125m"),
        pytest.param({"model_type": "xglm"}, 564_463_616, 564_463_616, 262_152_192, id="xglm-564m"),
        pytest.param(
            {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
            559_214_592, 559_214_592, 256_901_120, id="bloom-560m",
        ),
        pytest.param(
            {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
             "vocab_size": 50432},
            6_649_286_656, 6_649_286_656, 206_569_472, id="mpt-7b",
        ),
        pytest.param(
            {"model_type": "gpt_neox"}, 20_554_567_680, 20_244_713_472, 309_854_208,
            id="gpt-neox-20b",
        ),
        pytest.param(
            {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 512,
             "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048},
            70_426_624, 44_670_976, 25_755_648, id="pythia-70m",
        ),
        pytest.param(
            {"model_type": "phi", "vocab_size": 50295},
            1_414_562_935, 1_311_508_480, 103_054_455, id="phi-1",
        ),
        pytest.param(
            {"model_type": "persimmon"}, 9_397_175_296, 8_323_433_472, 1_073_741_824,
            id="persimmon-8b",
        ),
        pytest.param(
            {"model_type": "stablelm", "vocab_size": 100352, "hidden_size": 2048,
             "intermediate_size": 5632, "num_hidden_layers": 24, "use_qkv_bias": True},
            1_644_515_328, 1_438_994_432, 205_520_896, id="stablelm-2-1.6b",
        ),
        pytest.param(
            {"model_type": "starcoder2", "hidden_size": 4608, "intermediate_size": 18432,
             "num_hidden_layers": 32, "num_attention_heads": 36, "num_key_value_heads": 4},
            7_173_923_840, 7_173_923_840, 226_492_416, id="starcoder2-7b",
        ),
        pytest.param(
            {"model_type": "nemotron", "hidden_size": 3072, "intermediate_size": 9216,
             "num_attention_heads": 24, "num_key_value_heads": 8},
            4_190_509_056, 3_404_077_056, 786_432_000, id="nemotron-4-mini",
        ),
        pytest.param(
            {"model_type": "falcon"}, 6_921_720_704, 6_921_720_704, 295_469_056, id="falcon-7b"
        ),
        pytest.param(
            {"model_type": "falcon", "vocab_size": 50304, "hidden_size": 2048,
             "num_hidden_layers": 24, "num_attention_heads": 32, "alibi": True, "bias": True,
             "multi_query": False, "parallel_attn": False},
            1_311_625_216, 1_311_625_216, 103_022_592, id="falcon-rw-1b",
        ),
        pytest.param(
            {"model_type": "falcon", "hidden_size": 4096, "num_hidden_layers": 60,
             "num_attention_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 16384,
             "num_ln_in_parallel_attn": 1, "new_decoder_architecture": True,
             "tie_word_embeddings": False},
            11_102_822_400, 10_836_484_096, 266_338_304, id="falcon-11b",
        ),
    ],
)  # fmt: skip
def test_counts(config: dict[str, object], total: int, base: int, largest: int) -> None:
    counts = count_parameters(read(config))
    assert (counts.total, counts.base, counts.largest_layer) == (total, base, largest)


def test_opt_350m_projects_and_norms_after() -> None:
    config = {"model_type": "opt", "word_embed_proj_dim": 512, "do_layer_norm_before": False}
    stack = read(config).stacks[0]
    assert (stack.projected_out, stack.final_norm) == (True, None)
    assert stack.runs[0].layer.placement is NormPlacement.POST


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        pytest.param({"model_type": "openai-gpt", "afn": "gelu"}, Activation.GELU_NEW, id="gpt"),
        pytest.param({"model_type": "bloom"}, Activation.BLOOM_GELU, id="bloom"),
        pytest.param({"model_type": "mpt"}, Activation.GELU, id="mpt"),
        pytest.param({"model_type": "opt"}, Activation.RELU, id="opt"),
    ],
)
def test_activation(config: dict[str, object], activation: Activation) -> None:
    assert feed_forward_of(config).activation is activation


def test_multi_head_bigcode_interleaves_its_projection() -> None:
    config = {"model_type": "gpt_bigcode", "multi_query": False}
    assert attention_of(config).projection is Projection.FUSED_INTERLEAVED
    assert attention_of({"model_type": "gpt_bigcode"}).num_kv_heads == 1


@pytest.mark.parametrize(
    ("config", "dim"),
    [
        pytest.param({"model_type": "gpt_neox", "rotary_pct": 0.5}, 48, id="own key"),
        pytest.param({"model_type": "phi"}, 32, id="class"),
        pytest.param(
            {"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.25}}, 16,
            id="nested",
        ),
        pytest.param({"model_type": "starcoder2", "partial_rotary_factor": 0.5}, 128, id="never"),
    ],
)  # fmt: skip
def test_rotated_share(config: dict[str, object], dim: int) -> None:
    rotary = attention_of(config).rotary
    assert rotary is not None
    assert rotary.dim == dim


@pytest.mark.parametrize(
    ("config", "key"),
    [
        pytest.param({"model_type": "gpt2", "n_head": 7}, "hidden_size", id="heads"),
        pytest.param({"model_type": "gptj", "rotary_dim": 512}, "rotary_dim", id="rotary"),
        pytest.param(
            {"model_type": "gpt_neo", "num_layers": 5}, "attention_types", id="attention types"
        ),
        pytest.param(
            {"model_type": "opt", "activation_function": "x"}, "activation", id="function"
        ),
    ],
)
def test_refused(config: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(config)


def test_codegen_has_no_classifier() -> None:
    with pytest.raises(ConfigError, match="codegen has no task"):
        read({"model_type": "codegen"}, Task.SEQUENCE_CLASSIFICATION)


CONFIGS: dict[str, dict[str, object]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 1024},
    "gpt2-up": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
        "reorder_and_upcast_attn": True,
        "scale_attn_by_inverse_layer_idx": True,
        "attn_pdrop": 0.0,
    },
    "openai-gpt": {
        "model_type": "openai-gpt",
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
    },
    "gpt_bigcode-mh": {
        "model_type": "gpt_bigcode",
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
        "multi_query": False,
        "attn_pdrop": 0.0,
    },
    "gpt_neo-drop": {
        "model_type": "gpt_neo",
        "hidden_size": 256,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": 1024,
        "attention_types": [[["global", "local"], 2]],
        "attention_dropout": 0.1,
        "resid_dropout": 0.1,
        "embed_dropout": 0.1,
    },
    "gptj": {
        "model_type": "gptj",
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
        "rotary_dim": 32,
    },
    "codegen": {
        "model_type": "codegen",
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
        "rotary_dim": 32,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 1024,
        "max_position_embeddings": 1024,
        "attention_dropout": 0.1,
    },
    "opt-350": {
        "model_type": "opt",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 1024,
        "max_position_embeddings": 1024,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 128,
    },
    "xglm": {
        "model_type": "xglm",
        "d_model": 256,
        "num_layers": 3,
        "attention_heads": 4,
        "ffn_dim": 1024,
        "max_position_embeddings": 1024,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 256, "n_layer": 3, "n_head": 4},
    "bloom-post": {
        "model_type": "bloom",
        "hidden_size": 256,
        "n_layer": 3,
        "n_head": 4,
        "apply_residual_connection_post_layernorm": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "mpt": {"model_type": "mpt", "d_model": 256, "n_layers": 3, "n_heads": 4, "max_seq_len": 1024},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "gpt_neox-seq": {
        "model_type": "gpt_neox",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "hidden_act": "gelu_fast",
    },
    "phi": {
        "model_type": "phi",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "persimmon": {
        "model_type": "persimmon",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "stablelm": {
        "model_type": "stablelm",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
    },
    "stablelm-qk": {
        "model_type": "stablelm",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "qk_layernorm": True,
    },
    "stablelm-par": {
        "model_type": "stablelm",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
        "hidden_dropout": 0.1,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "starcoder2-w": {
        "model_type": "starcoder2",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "sliding_window": 128,
        "use_bias": False,
    },
    "nemotron": {
        "model_type": "nemotron",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "falcon-rw": {
        "model_type": "falcon",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "alibi": True,
        "bias": True,
        "multi_query": False,
        "parallel_attn": False,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "falcon-new": {
        "model_type": "falcon",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "falcon-11b": {
        "model_type": "falcon",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 768,
        "tie_word_embeddings": False,
    },
}
"""Small shapes, 1000 tokens in their vocabularies, that show each type's mechanisms."""


# A training step of transformers 5.23's class under torch 2.13, followed storage by storage on fake
# CUDA tensors, 512 tokens long: bytes kept after the forward pass, and how far each pass rises.
@pytest.mark.parametrize(
    ("name", "precision", "attention", "batch_size", "checkpointed", "kept", "forward", "backward"),
    [
        pytest.param("gpt2", "bf16", "sdpa", 2, False,
                     51_142_656, 57_295_360, 59_326_464, id="gpt2.bf16.sdpa.n2"),
        pytest.param("gpt2", "amp", "eager", 2, True,
                     11_707_392, 30_688_256, 60_319_744, id="gpt2.amp.eager.c2"),
        pytest.param("gpt2-up", "amp", "eager", 2, False,
                     119_759_872, 126_974_976, 128_483_328, id="gpt2-up.amp.eager.n2"),
        pytest.param("openai-gpt", "amp", "eager", 2, False,
                     121_844_736, 129_059_840, 130_568_192, id="openai-gpt.amp.eager.n2"),
        pytest.param("gpt_bigcode", "amp", "sdpa", 2, False,
                     38_219_776, 45_433_344, 46_403_584, id="gpt_bigcode.amp.sdpa.n2"),
        pytest.param("gpt_bigcode-mh", "fp32", "eager", 1, False,
                     41_801_216, 43_849_216, 45_892_608, id="gpt_bigcode-mh.fp32.eager.n1"),
        pytest.param("gpt_neo-drop", "amp", "eager", 2, True,
                     12_755_968, 38_942_208, 64_518_144, id="gpt_neo-drop.amp.eager.c2"),
        pytest.param("gptj", "bf16", "eager", 2, True,
                     7_787_520, 29_659_136, 37_367_296, id="gptj.bf16.eager.c2"),
        pytest.param("codegen", "bf16", "eager", 2, False,
                     87_761_920, 93_914_624, 95_945_728, id="codegen.bf16.eager.n2"),
        pytest.param("opt", "fp32", "sdpa", 2, True,
                     9_372_672, 14_700_544, 30_727_168, id="opt.fp32.sdpa.c2"),
        pytest.param("opt-350", "amp", "eager", 2, False,
                     74_804_224, 80_970_752, 82_988_032, id="opt-350.amp.eager.n2"),
        pytest.param("xglm", "bf16", "eager", 2, False,
                     76_253_696, 82_406_400, 84_437_504, id="xglm.bf16.eager.n2"),
        pytest.param("bloom", "bf16", "eager", 2, False,
                     68_658_176, 74_810_880, 76_841_984, id="bloom.bf16.eager.n2"),
        pytest.param("bloom-post", "amp", "eager", 2, False,
                     85_947_392, 93_268_992, 94_131_200, id="bloom-post.amp.eager.n2"),
        pytest.param("mpt", "amp", "eager", 2, False,
                     77_550_592, 84_751_872, 85_734_400, id="mpt.amp.eager.n2"),
        pytest.param("gpt_neox", "bf16", "sdpa", 2, False,
                     33_607_680, 39_760_384, 41_791_488, id="gpt_neox.bf16.sdpa.n2"),
        pytest.param("gpt_neox-seq", "amp", "eager", 2, True,
                     11_969_536, 33_962_496, 60_061_184, id="gpt_neox-seq.amp.eager.c2"),
        pytest.param("phi", "bf16", "eager", 2, False,
                     83_895_296, 90_048_000, 92_079_104, id="phi.bf16.eager.n2"),
        pytest.param("persimmon", "amp", "sdpa", 2, False,
                     63_250_432, 70_465_536, 74_333_184, id="persimmon.amp.sdpa.n2"),
        pytest.param("stablelm", "fp32", "sdpa", 2, True,
                     9_425_920, 16_060_416, 42_557_440, id="stablelm.fp32.sdpa.c2"),
        pytest.param("stablelm-qk", "bf16", "sdpa", 2, False,
                     37_687_296, 43_840_000, 45_871_104, id="stablelm-qk.bf16.sdpa.n2"),
        pytest.param("stablelm-par", "amp", "eager", 1, False,
                     44_426_752, 48_027_648, 48_518_144, id="stablelm-par.amp.eager.n1"),
        pytest.param("starcoder2", "amp", "eager", 2, True,
                     11_969_536, 33_307_136, 48_655_872, id="starcoder2.amp.eager.c2"),
        pytest.param("starcoder2-w", "bf16", "sdpa", 2, False,
                     33_705_984, 39_858_688, 41_889_792, id="starcoder2-w.bf16.sdpa.n2"),
        pytest.param("nemotron", "amp", "sdpa", 2, True,
                     8_955_904, 21_237_760, 38_299_648, id="nemotron.amp.sdpa.c2"),
        pytest.param("falcon", "bf16", "sdpa", 2, False,
                     28_176_384, 34_329_088, 36_360_192, id="falcon.bf16.sdpa.n2"),
        pytest.param("falcon", "amp", "eager", 2, False,
                     73_528_320, 80_729_600, 81_712_128, id="falcon.amp.eager.n2"),
        pytest.param("falcon-rw", "bf16", "eager", 2, False,
                     63_407_104, 84_602_880, 71_590_912, id="falcon-rw.bf16.eager.n2"),
        pytest.param("falcon-rw", "amp", "sdpa", 2, False,
                     59_777_024, 70_908_928, 67_960_832, id="falcon-rw.amp.sdpa.n2"),
        pytest.param("falcon-new", "fp32", "eager", 2, True,
                     11_719_680, 46_403_584, 45_882_368, id="falcon-new.fp32.eager.c2"),
        pytest.param("falcon-11b", "amp", "sdpa", 1, False,
                     19_780_096, 23_376_384, 23_871_488, id="falcon-11b.amp.sdpa.n1"),
    ],
)  # fmt: skip
def test_training_step(
    name: str,
    precision: str,
    attention: str,
    batch_size: int,
    checkpointed: bool,
    kept: int,
    forward: int,
    backward: int,
) -> None:
    weights = DType.BF16 if precision == "bf16" else DType.FP32
    tape = record_model(
        read({**CONFIGS[name], "vocab_size": 1000}, Task.CAUSAL_LM),
        TapeOptions(
            batch_size=batch_size,
            seq_len=512,
            weights=weights,
            compute=weights,
            autocast=DType.BF16 if precision == "amp" else None,
            kernels=Kernels(attention=AttentionKernel(attention)),
            decomposed=True,
            checkpointed_layers=float(checkpointed),
        ),
    )
    step = plain_step(StepWalk(tape).run())
    assert step.after_forward.total_bytes == pytest.approx(kept, rel=0.002)
    assert step.forward_peak.total_bytes == pytest.approx(forward, rel=3e-4)
    assert step.backward_peak.total_bytes == pytest.approx(backward, rel=4e-4)


# The classifier reads what the projection returns: 256 weights a label would be 512 without it.
def test_opt_350m_classifies_the_projected_states() -> None:
    config = {**CONFIGS["opt-350"], "vocab_size": 1000}
    counts = count_parameters(read(config, Task.SEQUENCE_CLASSIFICATION))
    assert (counts.total, counts.total - counts.base) == (2_825_728, 256)
