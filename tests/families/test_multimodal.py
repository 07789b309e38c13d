"""Language models with towers: counts of real models, and the traps of nested configs."""

from collections.abc import Mapping

import pytest

from memplan.classes.registry import CLASSES, is_joined
from memplan.dtypes import DType
from memplan.errors import ConfigError, SetupError
from memplan.graph.core.operation_kinds import ATTENTION_KERNELS
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.model.spec import Task
from memplan.training.freezing import FrozenParts
from tests.families.reading import counted, read, trained

FIVES = (["sliding_attention"] * 4 + ["full_attention"]) * 7

# Total, base model (None where there is no such class) and largest module, from transformers 5.23.
# What a config does not name is the class's default.
COUNTS = [
    pytest.param(
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}},
        7_063_427_072, 6_932_092_928, 131_334_144, id="llava-1.5-7b",
    ),
    pytest.param(
        {"model_type": "llava_next", "text_config": {"model_type": "mistral", "vocab_size":
        32064}},
        7_566_747_648, 7_435_413_504, 131_334_144, id="llava-next-mistral-7b",
    ),
    pytest.param(
        {"model_type": "llava_onevision", "text_config": {"model_type": "qwen2", "hidden_size":
        896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 24, "vocab_size": 152000, "tie_word_embeddings": True}},
        893_675_552, 893_675_552, 136_192_000, id="llava-onevision-0.5b",
    ),
    pytest.param(
        {"model_type": "video_llava", "text_config": {"model_type": "llama", "vocab_size":
        32064}},
        7_366_279_168, 7_234_945_024, 131_334_144, id="video-llava-7b",
    ),
    pytest.param(
        {"model_type": "vipllava"},
        7_079_690_240, 6_948_618_240, 131_072_000, id="vip-llava-7b",
    ),
    pytest.param(
        {"model_type": "llava", "text_config": {"model_type": "mistral", "hidden_size": 5120,
        "head_dim": 128, "num_hidden_layers": 40, "vocab_size": 131072}, "vision_config":
        {"model_type": "pixtral", "image_size": 1024}},
        12_682_739_712, 12_011_651_072, 671_088_640, id="pixtral-12b",
    ),
    pytest.param(
        {"model_type": "mistral3", "tie_word_embeddings": False},
        24_011_361_280, 23_340_272_640, 671_088_640, id="mistral-small-3.1-24b",
    ),
    pytest.param(
        {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size":
        10240, "num_hidden_layers": 34, "vocab_size": 262208}, "vision_config": {"model_type":
        "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size":
        4304, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        "vision_use_head": False}},
        4_300_079_472, 4_300_079_472, 671_252_480, id="gemma3-4b",
    ),
    pytest.param(
        {"model_type": "paligemma"},
        2_910_390_528, 2_910_390_528, 526_647_296, id="paligemma-3b-224",
    ),
    pytest.param(
        {"model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28,
        "vocab_size": 151936, "tie_word_embeddings": True, "vision_config": {"hidden_size":
        1536}},
        2_208_985_600, 2_208_985_600, 233_373_696, id="qwen2-vl-2b",
    ),
    pytest.param(
        {"model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
        "vocab_size": 152064, "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}},
        8_292_166_656, 7_747_169_280, 544_997_376, id="qwen2.5-vl-7b",
    ),
    pytest.param(
        {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": {"hidden_size":
        2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 36}, "vision_config": {"depth": 24, "hidden_size": 1024,
        "intermediate_size": 4096, "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11,
        17]}},
        4_437_815_808, 4_437_815_808, 388_956_160, id="qwen3-vl-4b",
    ),
    pytest.param(
        {"model_type": "glm4v"},
        10_292_777_472, 9_672_020_480, 620_756_992, id="glm-4.1v-9b",
    ),
    pytest.param(
        {"model_type": "internvl", "text_config": {"model_type": "qwen2", "hidden_size": 896,
        "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 24, "vocab_size": 151674}, "vision_config": {"attention_bias":
        True}},
        802_293_120, 802_293_120, 135_899_904, id="internvl3-1b",
    ),
    pytest.param(
        {"model_type": "smolvlm", "scale_factor": 3, "text_config": {"model_type": "llama",
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "vocab_size":
        49280}, "vision_config": {"hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": 27, "image_size": 384, "patch_size": 14}},
        2_246_784_880, 2_145_859_440, 100_925_440, id="smolvlm2-2.2b",
    ),
    pytest.param(
        {"model_type": "aya_vision", "alignment_intermediate_size": 28672, "text_config":
        {"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152,
        "image_size": 364, "intermediate_size": 4304, "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}},
        8_631_842_032, 8_631_842_032, 1_048_576_000, id="aya-vision-8b",
    ),
    pytest.param(
        {"model_type": "mllama", "vision_config": {"image_size": 560}},
        10_670_220_835, 10_144_884_259, 525_369_344, id="llama-3.2-11b-vision",
    ),
    pytest.param(
        {"model_type": "llama4", "text_config": {"num_hidden_layers": 2,
        "interleave_moe_layer_step": 2, "num_local_experts": 4, "hidden_size": 512,
        "vocab_size": 1000, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
        "vision_config": {"vision_output_dim": 4096}},
        508_373_504, 508_373_504, 50_331_648, id="llama-4-two-layers",
    ),
    pytest.param(
        {"model_type": "gemma4", "text_config": {"hidden_size": 1536, "intermediate_size": 6144,
        "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "layer_types": FIVES}, "vision_config": {}, "audio_config":
        {}},
        5_104_297_504, 5_104_297_504, 2_348_810_240, id="gemma4-e2b",
    ),
    pytest.param(
        {"model_type": "gemma4", "text_config": {"hidden_size": 2816, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "attention_k_eq_v": True,
        "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers":
        27, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72}},
        25_805_933_872, 25_805_933_872, 761_266_176, id="gemma4-26b-a4b",
    ),
    pytest.param(
        {"model_type": "instructblip", "text_config": {"model_type": "t5", "d_model": 2048,
        "d_ff": 5120, "num_layers": 24, "num_heads": 32, "feed_forward_proj": "gated-gelu"},
        "qformer_config": {"vocab_size": 30523}},
        3_957_170_944, 3_957_170_944, 65_798_144, id="instructblip-flan-t5-xl",
    ),
    pytest.param(
        {"model_type": "blip-2", "text_config": {"model_type": "opt", "hidden_size": 2560,
        "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 10240, "vocab_size":
        50304, "word_embed_proj_dim": 2560}},
        3_744_761_856, 3_744_761_856, 128_778_240, id="blip2-opt-2.7b",
    ),
    pytest.param(
        {"model_type": "florence2", "text_config": {"model_type": "bart", "d_model": 768,
        "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "vocab_size": 51289}, "vision_config": {"projection_dim": 768}},
        231_414_016, 231_414_016, 39_389_952, id="florence-2-base",
    ),
    pytest.param(
        {"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2", "hidden_size":
        4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 156032}},
        8_397_094_912, 7_757_987_840, 639_107_072, id="qwen2-audio-7b",
    ),
    pytest.param(
        {"model_type": "voxtral"},
        4_676_271_104, 4_273_617_920, 402_653_184, id="voxtral-mini-3b",
    ),
    pytest.param(
        {"model_type": "glmasr"},
        2_136_470_528, 2_136_470_528, 121_372_672, id="glm-asr-nano",
    ),
    pytest.param(
        {"model_type": "granite_speech", "encoder_config": {"num_layers": 16, "output_dim":
        256}, "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 1024,
        "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 2,
        "cross_attention_frequency": 1, "encoder_hidden_size": 1024}, "text_config":
        {"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 49160}},
        3_009_219_840, 3_009_219_840, 100_679_680, id="granite-speech-2b",
    ),
    pytest.param(
        {"model_type": "janus", "text_config": {"model_type": "llama", "hidden_size": 2048,
        "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_hidden_layers": 24, "vocab_size": 102400}},
        1_866_921_611, 1_866_921_611, 209_715_200, id="janus-pro-1b",
    ),
    pytest.param(
        {"model_type": "got_ocr2"},
        560_528_640, 560_528_640, 155_504_640, id="got-ocr-2",
    ),
    pytest.param(
        {"model_type": "glm_image"},
        10_114_245_632, 10_046_612_480, 688_390_144, id="glm-image",
    ),
    pytest.param(
        {"model_type": "ovis2", "tie_word_embeddings": False, "text_config": {"model_type":
        "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
        "num_key_value_heads": 2, "num_hidden_layers": 28, "vocab_size": 151936},
        "vision_config": {"image_size": 448, "hidden_stride": 2, "vocab_size": 65536}},
        2_455_831_542, 2_222_907_894, 268_414_976, id="ovis2-2b",
    ),
    pytest.param(
        {"model_type": "colpali"},
        2_910_652_800, None, 526_647_296, id="colpali-1.3",
    ),
    pytest.param(
        {"model_type": "kosmos-2.5"},
        1_374_646_272, 1_374_646_272, 166_626_816, id="kosmos-2.5",
    ),
    pytest.param(
        {"model_type": "qwen2_5_omni"},
        18_386_365_824, None, 544_997_376, id="qwen2.5-omni",
    ),
    pytest.param(
        {"model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": {"model_type":
        "kimi_k2", "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 8,
        "vocab_size": 1000, "n_group": 1}},
        1_652_511_216, 1_645_343_216, 352_321_536, id="kimi-two-layers",
    ),
    pytest.param(
        {"model_type": "paddleocr_vl", "tie_word_embeddings": False},
        799_695_472, 799_695_472, 105_906_176, id="paddleocr-vl",
    ),
    pytest.param(
        {"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2", "hidden_size": 1024,
        "block_dim": 1024, "block_ff_dim": 6656, "block_auto_adjust_ff_dim": True,
        "intermediate_size": 6656, "num_attention_heads": 16, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}},
        457_909_760, 457_909_760, 67_108_864, id="lfm2-vl-450m",
    ),
    pytest.param(
        {"model_type": "aria", "text_config": {"hidden_size": 2560, "intermediate_size": 1664,
        "moe_num_experts": 64, "moe_topk": 6, "num_attention_heads": 20, "num_hidden_layers": 2,
        "vocab_size": 1000}, "vision_config": {"model_type": "idefics3_vision", "image_size":
        980, "patch_size": 14, "intermediate_size": 4304, "num_hidden_layers": 2}},
        1_802_017_696, 1_799_457_696, 817_889_280, id="aria-two-layers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "total", "base", "largest"), COUNTS)
def test_counts(config: Mapping[str, object], total: int, base: int | None, largest: int) -> None:
    found = count_parameters(read(config))
    assert (found.total, found.largest_layer) == (total, largest)
    assert base is None or found.base == base


def config_of(name: str) -> dict[str, object]:
    config = next(each.values[0] for each in COUNTS if each.id == name)
    assert isinstance(config, dict)
    return config


def test_a_sequence_holds_its_pictures_too() -> None:
    """Qwen2-VL at 672 pixels: 48 x 48 patches, of which four make a token."""
    model = read(config_of("qwen2-vl-2b"))
    for seq_len, fits in ((576, True), (575, False)):
        if fits:
            record_model(model, TapeOptions(seq_len=seq_len))
            continue
        with pytest.raises(SetupError, match="576 tokens"):
            record_model(model, TapeOptions(seq_len=seq_len))
    with pytest.raises(SetupError, match="audio_seconds"):
        record_model(model, TapeOptions(seq_len=576, audio_seconds=3))
    with pytest.raises(SetupError, match="less than a patch"):
        record_model(model, TapeOptions(seq_len=576, image_size=13))


def test_aria_reads_pictures_of_as_many_patches_as_it_has_queries_for() -> None:
    """980 pixels are 4,900 patches, 490 are 1,225; for others its projector has no number of queries."""
    text = {"model_type": "aria_text", "num_hidden_layers": 1}
    vision = {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 14}
    model = read({"model_type": "aria", "text_config": text, "vision_config": vision})
    record_model(model, TapeOptions(seq_len=256, image_size=490))
    with pytest.raises(SetupError, match="1225, 4900"):
        record_model(model, TapeOptions(seq_len=256, image_size=448))


@pytest.mark.parametrize(
    "text", [{"model_type": "t5", "num_layers": 1}, {"model_type": "opt", "num_hidden_layers": 1}]
)
@pytest.mark.parametrize("model_type", ["blip-2", "instructblip", "instructblipvideo"])
def test_what_queries_read_is_written_over_embeddings(
    model_type: str, text: dict[str, object]
) -> None:
    model = read({"model_type": model_type, "text_config": text})
    assert not model.activations_left_out
    tape = record_model(model, TapeOptions(seq_len=256))
    assert "merge" in [segment.name for segment in tape.segments]


SEEING = sorted(each for each in CLASSES if is_joined(each))


@pytest.mark.parametrize("model_type", SEEING)
def test_every_type_says_what_it_leaves_out(model_type: str) -> None:
    config: dict[str, object] = {"model_type": model_type}
    if model_type == "glm4v_moe":
        config["text_config"] = {"head_dim": 128}
    if model_type == "gemma4":  # without it the class has no tower
        config["vision_config"] = {"model_type": "gemma4_vision"}
    model = read(config)
    assert (model.join is None) is model.activations_left_out.startswith("activations of ")
    assert model.family == model_type


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl", "gemma3", "idefics3"])
def test_weights_are_as_the_whole_says_and_else_as_its_text_does(model_type: str) -> None:
    """``modeling_utils._get_dtype`` (transformers 5.23) reads the outer config's, and where that has none the weights
    themselves; of several formats the whole's counts."""
    text = {"dtype": "bfloat16"}
    found = [
        read({"model_type": model_type, "text_config": text, **outer}).checkpoint_dtype
        for outer in ({}, {"dtype": "float16"}, {"torch_dtype": "float32"})
    ]
    assert found == [DType.BF16, DType.FP16, DType.FP32]


SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
SMALL_LLAVA = {
    "model_type": "llava",
    "text_config": {**SMALL, "model_type": "llama", "vocab_size": 100},
    "vision_config": {
        **SMALL,
        "model_type": "clip_vision_model",
        "image_size": 56,
        "patch_size": 14,
    },
    "vision_feature_layer": -2,
}


def test_layers_behind_the_one_that_is_read_run_and_lead_nowhere() -> None:
    """LLaVA reads what the last layer but one gives: the last one runs, keeps nothing and has no gradient."""
    tape = record_model(read(SMALL_LLAVA), TapeOptions(seq_len=64))
    *read_layers, last = [each for each in tape.segments if each.name.endswith("encoder.layers")]
    assert sum(each.repeat for each in read_layers) == 2
    assert sum(each.flops for each in last.operations) == sum(
        each.flops for each in read_layers[0].operations
    )
    assert all(each.unused for each in last.parameters)
    assert not any(each.saved or each.gradients for each in last.operations)
    projector = next(each for each in tape.segments if each.name == "projector")
    assert projector.input is read_layers[-1].output


def test_given_text_alone_nothing_runs_through_a_tower() -> None:
    tape = record_model(read(SMALL_LLAVA), TapeOptions(seq_len=64, images_per_sample=0))
    seen = [each for each in tape.segments if each.beside]
    assert sum(each.repeat for each in seen if each.is_layer) == 3
    assert all(weight.unused for each in seen for weight in each.parameters)
    assert not any(each.operations for each in seen)


def test_windows_at_the_edge_of_a_picture_are_smaller() -> None:
    """Two pictures of 18 patches a side in windows of 8 (transformers 5.23, ``vision_utils.py:130``, tells the same sizes);
    in a layer that sees all, each picture by itself. No patch is left out."""
    vision = {
        **SMALL,
        "depth": 2,
        "num_heads": 4,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
    }
    text = {**SMALL, "num_key_value_heads": 4, "vocab_size": 100}
    model = read({"model_type": "qwen2_5_vl", **text, "vision_config": vision})
    tape = record_model(model, TapeOptions(batch_size=2, seq_len=512, image_size=256))
    windowed, whole, _ = (
        [
            each.outputs[0].numel // 64
            for each in segment.operations
            if each.kind in ATTENTION_KERNELS
        ]
        for segment in tape.segments
        if segment.beside and segment.is_layer
    )
    assert windowed == 2 * [64, 64, 16, 64, 64, 16, 16, 16, 4]
    assert whole == [324, 324]


def test_a_window_with_room_for_no_token_is_refused() -> None:
    """transformers 5.23, ``vision_utils.py``, divides by the window's side, which is 0 then."""
    vision = {**SMALL, "depth": 2, "num_heads": 4, "out_hidden_size": 64, "window_size": 20}
    text = {**SMALL, "num_key_value_heads": 4, "vocab_size": 100}
    with pytest.raises(ConfigError, match=r"window_size.* 1 patches wide has no room for the 2"):
        read({"model_type": "qwen2_5_vl", **text, "vision_config": vision})


def test_frozen_parts_of_the_text_are_none_of_the_tower() -> None:
    options = TapeOptions(seq_len=64, freeze=FrozenParts(embeddings=True, norm=True))
    tape = record_model(read(SMALL_LLAVA), options)
    frozen = {
        each.name
        for each in tape.segments
        for weight in each.parameters
        if not weight.requires_grad
    }
    assert frozen == {"embed", "decoder.norm"}


def test_without_a_tower_it_is_its_text() -> None:
    model = read({"model_type": "gemma4"})
    assert (model.join, model.activations_left_out) == (None, "")


def test_only_the_outer_flag_ties() -> None:
    config = config_of("mistral-small-3.1-24b")
    apart = counted(config)[0]
    tied = counted({**config, "tie_word_embeddings": True})[0]
    assert apart - tied == 131072 * 5120
    inner = {"model_type": "mistral", "vocab_size": 131072, "tie_word_embeddings": True}
    assert not read({**config, "text_config": inner}).head.tied


def test_a_nested_flag_overrules_where_the_class_says_so() -> None:
    config = config_of("llava-onevision-0.5b")
    assert read({**config, "tie_word_embeddings": False}).head.tied


def test_a_flat_config_ties_by_the_text_class() -> None:
    """The outer class takes the flag for itself, so that the text's own default stands."""
    assert read(config_of("paddleocr-vl")).head.tied
    assert not read({**config_of("qwen2-vl-2b"), "tie_word_embeddings": False}).head.tied


def test_the_base_class_of_llama_4_has_the_head() -> None:
    model = read(config_of("llama-4-two-layers"))
    assert not model.head.tied
    found = count_parameters(model)
    assert found.total == found.base


def test_glm_image_scores_only_images() -> None:
    model = read(config_of("glm-image"))
    assert (model.vocab_size, model.num_outputs) == (168064, 16512)


def test_a_type_under_its_former_name() -> None:
    text = config_of("kimi-two-layers")["text_config"]
    assert isinstance(text, dict)
    renamed = {**config_of("kimi-two-layers"), "text_config": {**text, "model_type": "deepseek_v3"}}
    assert counted(renamed) == counted(config_of("kimi-two-layers"))


def test_sinusoids_are_counted_but_not_trained() -> None:
    config = config_of("qwen2-audio-7b")
    assert counted(config)[0] - trained(config) == 1500 * 1280


def test_a_tower_stands_beside_two_stacks() -> None:
    """What it gives is written over the embeddings of the encoder."""
    model = read(config_of("instructblip-flan-t5-xl"))
    assert len(model.stacks) == 2
    names = [segment.name for segment in record_model(model, TapeOptions()).segments]
    assert names.index("encoder.embed") < names.index("vision_tower.embed")
    assert names.index("qformer.layers") < names.index("encoder.layers")


def test_towers_are_components_of_their_own() -> None:
    components = dict(count_parameters(read(config_of("gemma4-e2b"))).components)
    assert components["vision tower"] == 167_364_608
    assert components["audio tower"] == 304_824_608


def test_gemma4_without_towers() -> None:
    text = config_of("gemma4-26b-a4b")["text_config"]
    model = read({"model_type": "gemma4", "text_config": text})
    assert not any("tower" in name for name, _ in count_parameters(model).components)


def test_gemma4_reuses_keys_and_values_in_its_last_layers() -> None:
    def projected(name: str) -> list[set[str]]:
        """Which projections of keys and values each layer of the text has."""
        tape = record_model(read(config_of(name)), TapeOptions())
        layers = [each for each in tape.segments if each.name == "decoder.layers"]
        found = [
            {
                each.name.split(".")[1]
                for each in layer.parameters
                if each.name.startswith("self_attn.")
            }
            & {"k_proj", "v_proj"}
            for layer in layers
            for _ in range(layer.repeat)
        ]
        assert all(layer.input is not None for layer in layers)
        return found

    found = projected("gemma4-e2b")
    assert all(found[:15])
    assert not any(found[15:])
    # Layers without a window have values that are their keys.
    assert projected("gemma4-26b-a4b")[-2:] == [{"k_proj", "v_proj"}, {"k_proj"}]


def test_qwen3_5_leaves_its_list_of_deep_layers_unused() -> None:
    config = {"model_type": "qwen3_5", "vision_config": {"deepstack_visual_indexes": [1, 2]}}
    assert counted(config) == counted({"model_type": "qwen3_5"})


def test_feature_layers_widen_the_projector() -> None:
    config = config_of("llava-1.5-7b")
    wider = counted({**config, "vision_feature_layer": [-2, -5, 3]})[0]
    assert wider - counted(config)[0] == 2 * 1024 * 4096


def test_the_base_task_has_no_output_matrix() -> None:
    config = config_of("voxtral-mini-3b")
    assert counted(config)[0] - counted(config, Task.BASE)[0] == 131072 * 3072


def test_a_missing_type_is_deduced_from_a_class_with_underscores() -> None:
    model = read({"architectures": ["Qwen2_5_VLForConditionalGeneration"]})
    assert model.family == "qwen2_5_vl"


def test_a_voice_that_is_switched_off() -> None:
    for speaks, spoken in ((False, set()), (True, {"talker", "token2wav"})):
        config = {"model_type": "qwen2_5_omni", "enable_audio_output": speaks}
        segments = record_model(read(config), TapeOptions()).segments
        idle = {each.beside for each in segments if all(one.unused for one in each.parameters)}
        assert idle - {""} == {"audio_tower", *spoken}
        assert {each.beside for each in segments} - idle == {"vision_tower"}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        pytest.param(
            {"model_type": "llava", "vision_config": {"model_type": "resnet"}},
            "vision_config.model_type: 'resnet' is not supported here", id="unknown tower",
        ),
        pytest.param(
            {"model_type": "llava", "text_config": {"model_type": "nobody"}},
            "text_config.model_type: 'nobody': no such text model", id="unknown text",
        ),
        pytest.param(
            {"model_type": "llava", "text_config": [1]},
            "text_config: expected an object", id="no object",
        ),
        pytest.param(
            {"model_type": "internvl", "downsample_ratio": 0},
            "downsample_ratio: must be above 0", id="ratio of nothing",
        ),
        pytest.param(
            {"model_type": "qwen3_vl", "vision_config": {"num_heads": 7}},
            "vision_config.hidden_size: 1152 is not divisible by num_heads (7)", id="heads",
        ),
        pytest.param(
            {"model_type": "gemma4", "text_config": {"enable_moe_block": True, "num_experts": 4,
             "top_k_experts": 8, "moe_intermediate_size": 8}},
            "text_config.top_k_experts: 8 of 4 experts", id="experts",
        ),
        pytest.param(
            {"model_type": "mllama", "vision_config": {"num_hidden_layers": 3}},
            "vision_config.intermediate_layers_indices: 3: there are 3 layers", id="layers",
        ),
        pytest.param(
            {"model_type": "florence2", "vision_config": {"embed_dim": []}},
            "vision_config.embed_dim: is empty", id="no stages",
        ),
    ],
)  # fmt: skip
def test_refused(config: Mapping[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(config)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_sequence_needs_room_for_its_picture(batch_size: int) -> None:
    """LLaVA's 24 x 24 patches, however many sequences there are."""
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 1}}
    model = read(config)
    assert record_model(model, TapeOptions(batch_size=batch_size, seq_len=576)).segments
    with pytest.raises(SetupError, match=r"575 tokens have no room .* sample, 576 tokens"):
        record_model(model, TapeOptions(batch_size=batch_size, seq_len=575))
