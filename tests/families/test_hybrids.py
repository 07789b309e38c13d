"""State-space decoders, hybrids and decoders that are partly counted: counts, and their traps.

Counts are transformers' own (5.23), for small configs on the meta device.
"""

from typing import Any

import pytest

import memplan
from memplan.errors import ConfigError, SetupError
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.mixers import (
    NOTHING,
    CountedSpec,
    MixerSpec,
)
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults


def read(model_type: str, **sizes: Any) -> ModelSpec:
    config = {"model_type": model_type, "vocab_size": 1000, **sizes}
    return read_model(config, source="config.json", name="x", defaults=class_defaults())


NARROW: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}

# Sizes, then all parameters, those of the base model, and those of the largest module.
COUNTS = [
    ("mamba", {"hidden_size": 512, "num_hidden_layers": 2, "expand": 3, "use_bias": True,
               "use_conv_bias": False, "vocab_size": 50280}, 30_833_152, 30_833_152, 25_743_360),
    ("mamba2", {"num_hidden_layers": 2, "hidden_size": 256, "num_heads": 8, "head_dim": 64,
                "n_groups": 2, "use_bias": True, "tie_word_embeddings": True},
     1_324_352, 1_324_352, 396_808),
    ("jamba", {"hidden_size": 512, "num_hidden_layers": 8, "num_experts": 1, "vocab_size": 65536},
     255_797_184, 222_242_752, 33_554_432),
    ("jamba", {"hidden_size": 512, "num_hidden_layers": 8, "mamba_proj_bias": True,
               "num_experts": 4, "vocab_size": 65536}, 520_064_448, 486_510_016, 88_080_384),
    ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1], "attention_bias": True,
               "mlp_bias": True, "mamba_proj_bias": True, "vocab_size": 128000},
     1_825_854_464, 1_301_566_464, 524_288_000),
    ("granitemoehybrid", {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
                          "hidden_size": 512, "num_attention_heads": 8, "mamba_n_heads": 16,
                          "num_local_experts": 4, "attention_bias": True, "vocab_size": 32000},
     245_150_304, 228_766_304, 67_633_152),
    ("granitemoehybrid", {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
                          "mamba_n_heads": 16, "num_local_experts": 0, "vocab_size": 32000},
     39_620_192, 23_236_192, 16_384_000),
    ("falcon_h1", {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
                   "num_key_value_heads": 2, "mamba_d_ssm": 768, "mamba_n_heads": 24,
                   "mamba_d_head": 32, "mamba_rms_norm": True, "projectors_bias": True,
                   "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                   "vocab_size": 128000}, 113_874_064, 113_874_064, 65_536_000),
    ("falcon_h1", {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
                   "num_key_value_heads": 2, "mamba_d_ssm": None, "mamba_n_heads": 32,
                   "vocab_size": 128000}, 180_143_808, 114_607_808, 65_536_000),
    ("nemotron_h", {"hidden_size": 512, "tie_word_embeddings": True, "vocab_size": 131072},
     246_096_768, 178_987_904, 67_108_864),
    ("nemotron_h", {"hidden_size": 512, "hybrid_override_pattern": "M*E-", "mlp_bias": True,
                    "attention_bias": True, "use_bias": True, "moe_latent_size": 128,
                    "vocab_size": 131072}, 199_042_696, 131_933_832, 67_108_864),
    ("nemotron_h", {"hidden_size": 512, "layers_block_type": ["mamba", "moe"], "mlp_bias": True,
                    "vocab_size": 131072}, 218_840_968, 151_732_104, 67_108_864),
    ("recurrent_gemma", {"num_hidden_layers": 5, "hidden_size": 512, "num_attention_heads": 4,
                         "num_key_value_heads": 1, "lru_width": 640, "attention_bias": True,
                         "intermediate_size": 1024, "tie_word_embeddings": False},
     10_405_120, 9_893_120, 512_000),
    ("rwkv", {"hidden_size": 512, "attention_hidden_size": 256, "num_hidden_layers": 3},
     9_692_160, 9_180_160, 1_048_576),
    ("zamba", {**NARROW, "num_hidden_layers": 12}, 46_809_088, 46_809_088, 7_602_176),
    ("zamba2", {"hidden_size": 512, "num_mem_blocks": 2, "use_shared_attention_adapter": True,
                "num_attention_heads": 8, "adapter_rank": 16, "add_bias_linear": True},
     107_299_520, 107_299_520, 2_101_248),
    ("zamba2", {**NARROW, "num_mem_blocks": 2, "n_mamba_heads": 8, "layers_block_type":
                ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"]},
     24_504_720, 24_504_720, 2_097_152),
    ("qwen3_5_text", {"num_hidden_layers": 3, "hidden_size": 512, "attention_bias": True,
                      "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                      "tie_word_embeddings": True, "vocab_size": 248320},
     208_026_496, 208_026_496, 127_139_840),
    ("qwen3_5_moe_text", {"num_hidden_layers": 4, "num_experts": 8, "vocab_size": 248320},
     1_258_875_968, 750_316_608, 508_559_360),
    ("qwen3_next", {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
                    "mlp_only_layers": [1], "hidden_size": 512, "vocab_size": 151936},
     217_664_576, 139_873_344, 77_791_232),
    ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
              "block_ff_dim": 6656, "hidden_size": 1024, "block_ffn_dim_multiplier": 1.3,
              "conv_bias": True, "tie_embedding": False, "num_attention_heads": 16,
              "vocab_size": 65536}, 200_039_552, 132_930_688, 67_108_864),
    ("lfm2_moe", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                  "num_dense_layers": 1, "num_experts": 4, "use_expert_bias": False,
                  "vocab_size": 65536}, 310_421_632, 310_421_632, 134_217_728),
    ("minimax", {"num_hidden_layers": 3, "hidden_size": 512, "num_local_experts": 4,
                 "vocab_size": 32000}, 299_640_832, 283_256_832, 88_080_384),
    ("diffllama", {**NARROW, "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True,
                   "vocab_size": 32000}, 59_512_832, 43_128_832, 16_384_000),
    ("jetmoe", {"num_hidden_layers": 2, "hidden_size": 512, "num_experts_per_tok": 3},
     176_693_760, 176_693_760, 46_137_344),
    ("dbrx", {"n_layers": 2, "d_model": 512, "n_heads": 8, "attn_config": {"kv_n_heads": 4},
              "ffn_config": {"ffn_hidden_size": 128}, "vocab_size": 32000},
     35_920_384, 19_536_384, 16_384_000),
    ("bitnet", {"num_hidden_layers": 2, "hidden_size": 640, "attention_bias": True,
                "vocab_size": 128256}, 192_779_264, 110_695_424, 82_083_840),
    ("doge", {"num_hidden_layers": 2, "hidden_size": 512, "num_key_value_heads": 2,
              "is_moe": True, "num_experts": 1000, "mlp_bias": True, "vocab_size": 32768},
     43_282_692, 26_505_476, 16_777_216),
    ("cpmant", {"num_hidden_layers": 2, "hidden_size": 512}, 49_850_880, 49_338_880, 5_242_880),
    ("deepseek_v4", {"num_hidden_layers": 4, "hidden_size": 512, "n_routed_experts": 8,
                     "compress_ratios": [0, 4, 128, 4, 0], "compress_rate_csa": 8,
                     "mlp_bias": True, "hc_mult": 2, "o_groups": 4},
     414_429_787, 413_917_787, 33_554_432),
    ("glm_moe_dsa", {"num_hidden_layers": 5, "hidden_size": 512, "n_routed_experts": 8,
                     "index_topk_pattern": "FFSSF"}, 429_542_144, 429_030_144, 33_554_432),
    ("glm_moe_dsa", {"num_hidden_layers": 4, "hidden_size": 512, "num_experts": 8,
                     "attention_bias": True, "mlp_layer_types":
                     ["dense", "sparse", "dense", "sparse"],
                     "indexer_types": ["full", "shared", "full", "shared"]},
     344_239_360, 343_727_360, 33_554_432),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "sizes", "total", "base", "largest"),
    COUNTS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(COUNTS)],
)
def test_counts(
    model_type: str, sizes: dict[str, Any], total: int, base: int, largest: int
) -> None:
    counts = count_parameters(read(model_type, **sizes))
    assert (counts.total, counts.base, counts.largest_layer) == (total, base, largest)


# Published models, in the sizes of their configs.
PUBLISHED = [
    ("mamba", {"num_hidden_layers": 24, "vocab_size": 50280}, 129_135_360),
    ("falcon_mamba", {"hidden_size": 4096, "expand": 16, "intermediate_size": 8192,
                      "num_hidden_layers": 64, "time_step_rank": 256, "vocab_size": 65024,
                      "tie_word_embeddings": False}, 7_272_665_088),
    ("rwkv", {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50277}, 169_342_464),
    ("jetmoe", {"num_hidden_layers": 24, "vocab_size": 32000}, 8_522_237_952),
    ("jamba", {"vocab_size": 65536, "mamba_dt_rank": 256}, 51_570_323_328),
    ("qwen3_next", {"vocab_size": 151936}, 79_674_391_296),
    ("cpmant", {"vocab_size": 30720}, 9_517_453_312),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "sizes", "total"), PUBLISHED, ids=[row[0] for row in PUBLISHED]
)
def test_published(model_type: str, sizes: dict[str, Any], total: int) -> None:
    assert count_parameters(read(model_type, **sizes)).total == total


# Parameters that one token passes, as transformers counts them: idle experts left out.
ACTIVE = [
    ("jetmoe", {"num_hidden_layers": 24, "vocab_size": 32000}, 2_331_445_248),
    ("dbrx", {"n_layers": 40, "d_model": 6144, "n_heads": 48, "vocab_size": 100352,
              "attn_config": {"kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10752,
              "moe_num_experts": 16, "moe_top_k": 4}}, 36_469_708_800),
    ("qwen3_next", {"vocab_size": 151936}, 3_874_929_408),
    ("openai_privacy_filter", {"vocab_size": 200064}, 178_612_625),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "sizes", "active"), ACTIVE, ids=[row[0] for row in ACTIVE])
def test_active(model_type: str, sizes: dict[str, Any], active: int) -> None:
    tape = record_model(read(model_type, **sizes), TapeOptions())
    assert active == sum(
        parameter.active_numel * segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
    )


def mixers(model: ModelSpec) -> list[type]:
    return [type(run.layer.attention) for run in model.stacks[0].runs for _ in range(run.count)]


def test_nemotron_names_layers_not_their_number() -> None:
    model = read("nemotron_h", hybrid_override_pattern="M*-", num_hidden_layers=7)
    assert mixers(model) == [MixerSpec, AttentionSpec, CountedSpec]
    last = model.stacks[0].runs[-1].layer
    assert last.attention == NOTHING
    assert isinstance(last.feed_forward, FeedForwardSpec)


def test_nemotron_is_never_tied() -> None:
    model = read("nemotron_h", tie_word_embeddings=True)
    assert not model.head.tied


def test_jamba_places_attention_and_experts_by_period() -> None:
    layers = [run.layer for run in read("jamba").stacks[0].runs for _ in range(run.count)]
    attends = [number for number, layer in enumerate(layers)
               if isinstance(layer.attention, AttentionSpec)]  # fmt: skip
    sparse = [number for number, layer in enumerate(layers)
              if isinstance(layer.feed_forward, MixtureSpec)]  # fmt: skip
    assert attends == [4, 12, 20, 28]
    assert sparse == list(range(1, 32, 2))


def test_lfm2_rounds_its_feed_forward_up() -> None:
    network = read("lfm2", block_ff_dim=6656, hidden_size=1024).stacks[0].runs[0].layer.feed_forward
    assert isinstance(network, FeedForwardSpec)
    assert network.intermediate_size == 4608


@pytest.mark.parametrize(
    ("model_type", "mixer"),
    [
        pytest.param("qwen3_next", MixerSpec, id="delta rule"),
        pytest.param("minimax", MixerSpec, id="lightning"),
        pytest.param("lfm2", MixerSpec, id="convolution"),
    ],
)
def test_written_mixers_leave_nothing_out(model_type: str, mixer: type) -> None:
    kind = "conv" if model_type == "lfm2" else "linear_attention"
    model = read(model_type, num_hidden_layers=2, layer_types=[kind, "full_attention"])
    assert mixers(model) == [mixer, AttentionSpec]
    assert not model.activations_left_out


@pytest.mark.parametrize("model_type", ["zamba", "zamba2", "recurrent_gemma"])
def test_recurrent_layers_are_written(model_type: str) -> None:
    assert not read(model_type).activations_left_out


def test_zamba_layers_share_their_block() -> None:
    tape = record_model(read("zamba2", num_mem_blocks=2, **NARROW), TapeOptions())
    owned = [
        each.name for segment in tape.segments for each in segment.parameters
        if each.name == "shared_transformer.self_attn.q_proj.weight"
    ]  # fmt: skip
    assert len(owned) == 2, "each of the two blocks is one layer's"


def test_only_some_layers_have_an_indexer() -> None:
    model = read("glm_moe_dsa", num_hidden_layers=4, index_topk_freq=2)
    found = [run.layer.attention for run in model.stacks[0].runs for _ in range(run.count)]
    indexers = [spec.indexer for spec in found if isinstance(spec, LatentAttentionSpec)]
    assert [indexer is not None for indexer in indexers] == [True, True, False, True]
    assert not model.activations_left_out


def test_kimi_layers_are_counted_from_one() -> None:
    listed = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 3}
    model = read("kimi_linear", num_hidden_layers=3, linear_attn_config=listed)
    assert mixers(model) == [MixerSpec, LatentAttentionSpec, MixerSpec]
    scales = {each.shape for each in record_model(model, TapeOptions()).segments[1].parameters}
    assert (1, 1, 3, 1) in scales, "each head fades at a rate of its own"
    assert not model.activations_left_out


def test_privacy_filter_classifies_tokens() -> None:
    model = read("openai_privacy_filter")
    assert model.task is Task.TOKEN_CLASSIFICATION
    assert model.num_labels == 33


@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        pytest.param("mamba2", {"num_heads": 3}, "num_heads: 3 heads of 64", id="heads"),
        pytest.param("bamba", {"mamba_n_heads": 7}, "mamba_n_heads: 7", id="mixer heads"),
        pytest.param("jamba", {"attn_layer_offset": 8}, "attn_layer_offset", id="offset"),
        pytest.param("diffllama", {"num_key_value_heads": 1}, "is odd", id="odd"),
        pytest.param("dbrx", {"ffn_config": {"moe_top_k": 9}}, "ffn_config.moe_top_k", id="top k"),
        pytest.param("deepseek_v4", {"compress_ratios": [5]}, "none of 0, 4, 128", id="ratio"),
        pytest.param("nemotron_h", {"hybrid_override_pattern": "MX"}, "'X' is not known", id="X"),
        pytest.param("zamba2", {"layers_block_type": ["conv"]}, "'conv' is not known", id="block"),
        pytest.param("minimax", {"layer_types": ["attention"]}, "names 1 layers of", id="few"),
        pytest.param("qwen3_next", {"linear_num_value_heads": 24}, "not divisible", id="groups"),
        pytest.param(
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [3]}},
            "each of 27 layers once",
            id="gap",
        ),
    ],
)
def test_impossible_sizes(model_type: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(model_type, **sizes)


def test_adapters_of_time_steps_where_the_module_is_called() -> None:
    """transformers multiplies by ``dt_proj.weight`` itself, past an adapter; of a quantized Jamba it calls the module."""
    small = {
        "hidden_size": 512, "num_hidden_layers": 8, "num_experts": 1, "vocab_size": 1000, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 2, "model_type": "jamba", "architectures": ["JambaForCausalLM"],
    }  # fmt: skip
    fields: dict[str, Any] = {
        "adapter": memplan.Lora(rank=8, targets=("dt_proj",)), "precision": "bf16-autocast", "seq_len": 128,
    }  # fmt: skip
    with pytest.raises(SetupError, match="goes past its adapter"):
        memplan.estimate(small, memplan.TrainingSetup(**fields))
    found = memplan.estimate(small, memplan.TrainingSetup(**fields, quantize="nf4"))
    # Of the seven layers that scan: a factor from 32 steps and one to 1,024 channels.
    assert found.trainable_params == 7 * 8 * (32 + 1024)
