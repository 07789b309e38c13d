"""Mixtures of experts and latent attention: counts of real models, and what sets types apart."""

from collections.abc import Mapping

import pytest

from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.model.attention import AttentionSpec, OutputGate
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import LayerSpec
from memplan.model.mixtures import MixtureSpec
from memplan.model.spec import ModelSpec
from memplan.sources.about_models.defaults import class_defaults


def read(config: Mapping[str, object]) -> ModelSpec:
    return read_model(config, source="config.json", name="x", defaults=class_defaults())


def layers(config: Mapping[str, object]) -> list[LayerSpec]:
    runs = read(config).stacks[0].runs
    return [run.layer for run in runs for _ in range(run.count)]


def attention(config: Mapping[str, object], number: int = -1) -> AttentionSpec:
    found = layers(config)[number].attention
    assert isinstance(found, AttentionSpec)
    return found


def mixture(config: Mapping[str, object], number: int = -1) -> MixtureSpec:
    found = layers(config)[number].feed_forward
    assert isinstance(found, MixtureSpec)
    return found


def times_recorded(config: Mapping[str, object], kind: OperationKind) -> int:
    """How often a layer runs an operation."""
    tape = record_model(read(config), TapeOptions())
    ran = (
        each.kind for segment in tape.segments if segment.is_layer for each in segment.operations
    )
    return list(ran).count(kind)


def active_parameters(tape: Tape) -> int:
    return sum(
        parameter.active_numel * segment.repeat
        for segment in tape.segments
        for parameter in segment.parameters
    )


# Total, base model, largest module and active parameters, from transformers 5.23. What a config does
# not name is the class's default.
COUNTS = [
    pytest.param(
        {"model_type": "mixtral"},
        46_702_792_704, 46_571_720_704, 1_409_286_144, 12_879_925_248, id="mixtral-8x7b",
    ),
    pytest.param(
        {"model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384,
         "num_attention_heads": 48, "num_hidden_layers": 56, "vocab_size": 32768},
        140_630_071_296, 140_428_744_704, 2_415_919_104, 39_161_468_928, id="mixtral-8x22b",
    ),
    pytest.param(
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
        30_532_122_624, 30_220_957_696, 603_979_776, 3_353_032_704, id="qwen3-30b-a3b",
    ),
    pytest.param(
        {"model_type": "qwen2_moe"},
        14_315_784_192, 14_004_619_264, 519_045_120, 2_689_173_504, id="qwen1.5-moe-a2.7b",
    ),
    pytest.param(
        {"model_type": "olmoe", "intermediate_size": 1024},
        6_919_161_856, 6_816_139_264, 402_653_184, 1_282_017_280, id="olmoe-1b-7b",
    ),
    pytest.param(
        {"model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512,
         "num_attention_heads": 16, "num_key_value_heads": 8, "num_experts_per_tok": 8,
         "num_hidden_layers": 24, "num_local_experts": 32, "tie_word_embeddings": True,
         "vocab_size": 49152},
        1_334_625_280, 1_334_625_280, 50_331_648, 428_655_616, id="granite-3.0-1b-a400m",
    ),
    pytest.param(
        {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
        41_873_153_344, 41_741_787_136, 1_258_291_200, 6_640_999_744, id="phi-3.5-moe",
    ),
    pytest.param(
        {"model_type": "dots1", "hidden_size": 4096, "first_k_dense_replace": 1,
         "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
        142_774_373_888, 142_151_519_744, 2_214_592_512, 14_016_581_120, id="dots.llm1",
    ),
    pytest.param(
        {"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128},
        106_852_245_504, 106_231_488_512, 2_214_592_512, 13_424_123_904, id="glm-4.5-air",
    ),
    pytest.param(
        {"model_type": "solar_open"},
        102_651_793_408, 101_846_487_040, 2_013_265_920, 12_054_827_008, id="solar-open-100b",
    ),
    pytest.param(
        {"model_type": "ernie4_5_moe", "hidden_size": 8192, "num_hidden_layers": 54,
         "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
         "moe_intermediate_size": 3584, "moe_k": 8, "moe_num_shared_experts": 0,
         "moe_layer_start_index": 3, "moe_layer_end_index": 53, "tie_word_embeddings": False},
        299_484_163_264, 298_636_913_856, 5_637_144_576, 47_926_586_560, id="ernie-4.5-300b",
    ),
    pytest.param(
        {"model_type": "minimax_m2", "rotary_dim": 64},
        228_689_748_992, 228_075_152_384, 3_623_878_656, 11_030_537_216, id="minimax-m2",
    ),
    pytest.param(
        {"model_type": "hy_v3"},
        295_033_528_320, 294_538_600_448, 3_623_878_656, 20_675_715_072, id="hunyuan-v3",
    ),
    pytest.param(
        {"model_type": "afmoe", "moe_intermediate_size": 1024, "num_attention_heads": 32,
         "num_key_value_heads": 4, "num_dense_layers": 2, "num_experts": 128,
         "num_experts_per_tok": 8, "num_shared_experts": 1},
        26_123_974_400, 25_713_981_184, 805_306_368, 3_474_732_800, id="trinity-mini",
    ),
    pytest.param(
        {"model_type": "laguna", "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
         "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10},
        33_442_617_088, 33_237_096_192, 805_306_368, 3_017_135_872, id="laguna-xs",
    ),
    pytest.param(
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
        20_914_757_184, 20_335_623_744, 796_538_880, 4_187_440_704, id="gpt-oss-20b",
    ),
    pytest.param(
        {"model_type": "mimo_v2_flash"},
        308_778_768_832, 308_153_817_536, 6_442_450_944, 15_445_924_288, id="mimo-v2-flash",
    ),
    pytest.param(
        {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048,
         "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
         "num_hidden_layers": 27, "num_experts_per_tok": 6, "q_lora_rank": None},
        15_706_484_224, 15_496_769_024, 553_648_128, 2_661_150_208, id="deepseek-v2-lite",
    ),
    pytest.param(
        {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 5120,
         "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
         "num_attention_heads": 128, "num_hidden_layers": 60, "num_experts_per_tok": 6},
        235_741_434_880, 235_217_146_880, 3_774_873_600, 21_375_800_320, id="deepseek-v2",
    ),
    pytest.param(
        {"model_type": "deepseek_v3"},
        671_026_404_352, 670_099_725_312, 11_274_289_152, 37_552_282_624, id="deepseek-v3",
    ),
    pytest.param(
        {"model_type": "deepseek_v32"},
        671_877_929_216, 670_951_250_176, 11_274_289_152, 38_403_807_488, id="deepseek-v3.2",
    ),
    pytest.param(
        {"model_type": "glm4_moe_lite"},
        29_943_390_976, 29_626_196_736, 603_979_776, 3_896_763_136, id="glm-4.7-flash",
    ),
    pytest.param(
        {"model_type": "minicpm3"},
        4_073_875_968, 4_073_875_968, 188_026_880, 4_073_875_968, id="minicpm3-4b",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "total", "base", "largest", "active"), COUNTS)
def test_counts(
    config: Mapping[str, object], total: int, base: int, largest: int, active: int
) -> None:
    model = read(config)
    counts = count_parameters(model)
    assert (counts.total, counts.base, counts.largest_layer) == (total, base, largest)
    assert active_parameters(record_model(model, TapeOptions())) == active


def test_unfused_matrix_is_one_experts_gate() -> None:
    tape = record_model(read({"model_type": "mixtral"}), TapeOptions())
    sizes = {
        parameter.name: parameter.unfused_numel
        for segment in tape.segments
        for parameter in segment.parameters
        if parameter.experts is not None
    }
    assert sizes == {
        "mlp.experts.gate_up_proj": 14336 * 4096, "mlp.experts.down_proj": 4096 * 14336,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [2]}, [2]),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2}, [0, 2]),
        ({"model_type": "glm4_moe", "num_hidden_layers": 3, "head_dim": 128}, [0]),
        ({"model_type": "hy_v3", "num_hidden_layers": 3}, [0]),
        ({"model_type": "ernie4_5_moe", "num_hidden_layers": 3}, [0]),
        ({"model_type": "ernie4_5_moe", "num_hidden_layers": 4, "moe_layer_interval": 2}, [0, 2]),
        ({"model_type": "afmoe", "num_hidden_layers": 3, "num_dense_layers": 2}, [0, 1]),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 4}, [0, 1, 2]),
        ({"model_type": "glm4_moe_lite", "num_hidden_layers": 3}, [0]),
        (
            {"model_type": "deepseek_v32", "num_hidden_layers": 2,
             "mlp_layer_types": ["sparse", "dense"]},
            [1],
        ),
    ],
)  # fmt: skip
def test_dense_layers(config: Mapping[str, object], dense: list[int]) -> None:
    found = [
        number
        for number, layer in enumerate(layers(config))
        if not isinstance(layer.feed_forward, MixtureSpec)
    ]
    assert found == dense


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mixtral", "num_hidden_layers": 2}, [None, None]),
        ({"model_type": "mixtral", "num_hidden_layers": 2, "sliding_window": 64}, [64, 64]),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 1}, [None]),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 1, "use_sliding_window": True},
            [4096],
        ),
        (
            {"model_type": "qwen2_moe", "num_hidden_layers": 3, "use_sliding_window": True},
            [4096, None, 4096],
        ),
        ({"model_type": "dots1", "num_hidden_layers": 2, "max_window_layers": 1,
          "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}, [None, 4096]),
        ({"model_type": "afmoe", "num_hidden_layers": 4}, [1024, 1024, 1024, None]),
        ({"model_type": "gpt_oss", "num_hidden_layers": 2}, [128, None]),
        ({"model_type": "mimo_v2_flash", "num_hidden_layers": 3}, [None, 129, 129]),
    ],
)  # fmt: skip
def test_windows(config: Mapping[str, object], windows: list[int | None]) -> None:
    found = [layer.attention for layer in layers(config)]
    assert [each.sliding_window for each in found if isinstance(each, AttentionSpec)] == windows


def test_qwen_normalizes_only_when_told() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1}
    assert times_recorded(config, OperationKind.DIV) == 0
    assert times_recorded({**config, "norm_topk_prob": True}, OperationKind.DIV) == 1


@pytest.mark.parametrize(
    ("model_type", "key", "times"),
    [
        ("mixtral", "router_jitter_noise", 1),
        ("minimax_m2", "router_jitter_noise", 1),
        ("phimoe", "input_jitter_noise", 2),
    ],
)
def test_jitter(model_type: str, key: str, times: int) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 1}
    kind = OperationKind.MUL_IN_PLACE
    assert times_recorded({**config, key: 0.01}, kind) == times_recorded(config, kind) + times


def test_partial_rotary() -> None:
    assert attention({"model_type": "glm4_moe", "head_dim": 128}).rotary is not None
    shares = {
        "glm4_moe": ({"head_dim": 128}, 64),
        "minimax_m2": ({"rotary_dim": 64}, 64),
        "mimo_v2_flash": ({}, 64),
    }
    for model_type, (sizes, dim) in shares.items():
        rotary = attention({"model_type": model_type, **sizes}).rotary
        assert rotary is not None
        assert rotary.dim == dim


def test_laguna_kinds_of_layers_differ() -> None:
    config = {
        "model_type": "laguna", "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [48, 64],
    }  # fmt: skip
    full, local = attention(config, 0), attention(config, 1)
    assert (full.num_heads, local.num_heads) == (48, 64)
    assert full.rotary is not None
    assert local.rotary is not None
    assert (full.rotary.dim, local.rotary.dim) == (64, 128)
    assert full.output_gate is OutputGate.SOFTPLUS_PER_HEAD
    assert attention({**config, "gating": "per-element"}).output_gate is OutputGate.SOFTPLUS


def test_mimo_local_layers_have_sinks_and_twice_the_heads() -> None:
    config = {"model_type": "mimo_v2_flash", "num_hidden_layers": 2}
    full, local = attention(config, 0), attention(config, 1)
    assert (full.num_kv_heads, full.sinks) == (4, False)
    assert (local.num_kv_heads, local.sinks) == (8, True)
    assert full.value_head_dim == 128


def test_afmoe_rotates_only_local_layers() -> None:
    found = [
        attention({"model_type": "afmoe", "num_hidden_layers": 4}, number).rotary is not None
        for number in range(4)
    ]
    assert found == [True, True, True, False]


def test_null_query_rank_means_one_layer() -> None:
    def latent(config: Mapping[str, object]) -> LatentAttentionSpec:
        found = layers({"model_type": "deepseek_v3", "num_hidden_layers": 1, **config})[0].attention
        assert isinstance(found, LatentAttentionSpec)
        return found

    assert latent({}).query_rank == 1536
    assert latent({"q_lora_rank": None}).query_rank is None
    assert latent({}).scores.head_dim == 192


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "n_group": 7}, "num_experts"),
        ({"model_type": "hy_v3", "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"model_type": "afmoe", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [48]}, "num_attention_heads"),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts"),
    ],
)
def test_refused(config: Mapping[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(config)


# -- what the tape keeps ------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 1, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 1000,
}  # fmt: skip


def kept_by(tape: Tape, *names: str) -> int:
    """Bytes that the operations of these names keep in the layer."""
    layer = next(segment for segment in tape.segments if segment.name == "decoder.layers")
    storages = {
        storage
        for operation in layer.operations
        if operation.name in names
        for storage in operation.saved
    }
    return sum(storage.num_bytes for storage in storages)


def test_experts_keep_rows_of_every_chosen_pair() -> None:
    config = {"model_type": "mixtral", "intermediate_size": 1024, **SMALL}
    tape = record_model(read(config), TapeOptions(batch_size=1, seq_len=256))
    rows, offsets = 256 * 2, 512
    inputs, products = rows * 512 * 4, rows * 1024 * 4
    assert kept_by(tape, "grouped_mm") == inputs + products + offsets


def test_router_in_fp32_keeps_a_copy_of_the_hidden_states() -> None:
    from memplan.dtypes import DType

    options = TapeOptions(batch_size=1, seq_len=256, weights=DType.BF16, compute=DType.BF16)
    config = {"model_type": "solar_open", "n_routed_experts": 8, "num_experts_per_tok": 2, **SMALL}
    tape = record_model(read(config), options)
    layer = next(segment for segment in tape.segments if segment.name == "decoder.layers")
    router = next(
        operation for operation in layer.operations
        if operation.name == "linear" and operation.outputs[0].dtype is DType.FP32
    )  # fmt: skip
    assert sum(storage.num_bytes for storage in router.saved) == (256 + 8) * 512 * 4


def test_router_loss_keeps_a_softmax_of_every_router() -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 16, **SMALL, "num_hidden_layers": 3}
    plain = record_model(read(config), TapeOptions(seq_len=128))
    with_loss = record_model(
        read({**config, "output_router_logits": True}), TapeOptions(seq_len=128)
    )

    def kept(tape: Tape) -> int:
        head = tape.segments[-1]
        return sum(each.num_bytes for operation in head.operations for each in operation.saved)

    def made(tape: Tape) -> int:
        head = tape.segments[-1]
        outputs = (each for operation in head.operations for each in operation.outputs)
        return sum(each.storage.num_bytes for each in outputs)

    assert kept(with_loss) - kept(plain) == 3 * 128 * 16 * 4
    assert made(with_loss) - made(plain) == 2 * 3 * 128 * 16 * 4  # the logits, and their softmax
