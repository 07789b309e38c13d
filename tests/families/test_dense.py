"""Dense decoders beyond Llama: counts, and what sets the types apart."""

import pytest

from memplan.classes.llama import LlamaModel
from memplan.classes.registry import base_class
from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.families import read_model, supported_families
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.model.attention import AttentionSpec
from memplan.model.layers import NormPlacement
from memplan.model.spec import ModelSpec
from memplan.sources.about_models.defaults import class_defaults
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 1000,
}  # fmt: skip


def read(model_type: str, **sizes: object) -> ModelSpec:
    config: dict[str, object] = {"model_type": model_type, **SMALL, **sizes}
    return read_model(config, source="config.json", name="x", defaults=class_defaults())


def attentions(model: ModelSpec) -> list[AttentionSpec]:
    found = []
    for run in model.stacks[0].runs:
        assert isinstance(run.layer.attention, AttentionSpec)
        found += [run.layer.attention] * run.count
    return found


# Counts from transformers 5.23, with and without the head; head sizes are the classes' defaults,
# but for Helium's, whose heads must fill the hidden size.
COUNTS = [
    ("gemma", 1_449_024, 1_449_024),
    ("gemma2", 1_449_536, 1_449_536),
    ("gemma3_text", 1_451_584, 1_451_584),
    ("vaultgemma", 1_449_024, 1_449_024),
    ("phi3", 243_264, 179_264),
    ("olmo", 242_688, 178_688),
    ("olmo2", 243_584, 179_584),
    ("olmo3", 243_584, 179_584),
    ("cohere", 179_008, 179_008),
    ("cohere2", 179_008, 179_008),
    ("glm", 863_808, 799_808),
    ("glm4", 864_320, 800_320),
    ("granite", 243_264, 179_264),
    ("hyperclovax", 243_776, 179_776),
    ("arcee", 218_688, 154_688),
    ("apertus", 218_760, 154_760),
    ("exaone4", 243_328, 179_328),
    ("smollm3", 179_264, 179_264),
    ("ministral3", 857_664, 793_664),
    ("hunyuan_v1_dense", 243_328, 179_328),
    ("seed_oss", 863_808, 799_808),
    ("helium", 243_264, 179_264),
    ("jais2", 220_544, 156_544),
    ("cwm", 857_664, 793_664),
]


@pytest.mark.parametrize(("model_type", "total", "base"), COUNTS)
def test_counts(model_type: str, total: int, base: int) -> None:
    sizes = {"head_dim": 8} if model_type == "helium" else {}
    counts = count_parameters(read(model_type, **sizes))
    assert (counts.total, counts.base) == (total, base)


@pytest.mark.parametrize(
    ("model_type", "total"),
    [("gemma", 1_513_024), ("cohere", 243_008), ("phi3", 179_264), ("granite", 179_264)],
)
def test_the_config_overrules_the_tie(model_type: str, total: int) -> None:
    tied = model_type in {"phi3", "granite"}
    assert count_parameters(read(model_type, tie_word_embeddings=tied)).total == total


def test_every_type_is_counted() -> None:
    elsewhere = {
        "llama", "mistral", "qwen2", "qwen3", "nemotron", "starcoder2", "gpt_neox", "phi", "stablelm",
        "persimmon", "bitnet", "diffllama", "doge", "fuyu", "gemma4_text", "mllama_text_model",
        "muse_glimmer_text",
    }  # fmt: skip
    found = {name: base_class(name) for name in supported_families()}
    rooms = (
        "memplan.classes.mixed",
        "memplan.classes.older",
        "memplan.classes.recurrent",
    )  # counted in test_mixtures, test_gpt, test_hybrids
    decoders = {
        name
        for name, base in found.items()
        if issubclass(base, LlamaModel) and not base.__module__.startswith(rooms)
    }
    assert {model_type for model_type, *_ in COUNTS} == decoders - elsewhere


# Published shapes; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "sizes", "total", "largest"),
    [
        pytest.param(
            "gemma",
            {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 256_000},
            8_537_680_896, 786_432_000, id="gemma-7b",
        ),
        pytest.param(
            "gemma2",
            {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256_000},
            2_614_341_888, 589_824_000, id="gemma-2-2b",
        ),
        pytest.param(
            "phi3",
            {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_064},
            3_821_079_552, 98_500_608, id="phi-3-mini",
        ),
    ],
)  # fmt: skip
def test_real_models(model_type: str, sizes: dict[str, object], total: int, largest: int) -> None:
    counts = count_parameters(read(model_type, **sizes))
    assert (counts.total, counts.largest_layer) == (total, largest)


def test_fuyu_owns_a_patch_layer_that_text_leaves_unused() -> None:
    text = {"model_type": "persimmon", **SMALL, "num_key_value_heads": None}
    config = {"model_type": "fuyu", "patch_size": 2, "text_config": text}
    model = read_model(config, source="config.json", name="x", defaults=class_defaults())
    unused = [each for each in record(model).segments[0].parameters if each.unused]
    assert [each.numel for each in unused] == [64 * 2 * 2 * 3, 64]


def record(model: ModelSpec, *, attention: str = "sdpa", seq_len: int = 128) -> Tape:
    return record_model(
        model,
        TapeOptions(
            batch_size=2,
            seq_len=seq_len,
            weights=DType.BF16,
            compute=DType.BF16,
            kernels=Kernels(attention=AttentionKernel(attention)),
        ),
    )


@pytest.mark.parametrize(
    ("model_type", "sizes", "windows"),
    [
        pytest.param("gemma2", {}, "LFLF", id="every other"),
        pytest.param("gemma3_text", {"num_hidden_layers": 6}, "LLLLLF", id="five of six"),
        pytest.param("cohere2", {}, "LLLF", id="three of four"),
        pytest.param("cohere2", {"sliding_window_pattern": 2}, "LFLF", id="pattern in the config"),
        pytest.param("phi3", {"sliding_window": 64}, "LLLL", id="all"),
        pytest.param("phi3", {}, "FFFF", id="no window"),
        pytest.param("smollm3", {"sliding_window": 64}, "FFFF", id="switched off"),
        pytest.param(
            "smollm3", {"sliding_window": 64, "use_sliding_window": True}, "FFFL",
            id="where nothing is turned",
        ),
        pytest.param(
            "olmo3", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}, "FLLL",
            id="listed",
        ),
    ],
)  # fmt: skip
def test_windows(model_type: str, sizes: dict[str, object], windows: str) -> None:
    found = "".join(
        "F" if each.sliding_window is None else "L"
        for each in attentions(read(model_type, **sizes))
    )
    assert found == windows


@pytest.mark.parametrize(
    ("model_type", "turned"), [("cohere2", "yyyn"), ("exaone4", "yyyn"), ("smollm3", "yyyn")]
)
def test_some_layers_know_no_positions(model_type: str, turned: str) -> None:
    found = "".join("n" if each.rotary is None else "y" for each in attentions(read(model_type)))
    assert found == turned


@pytest.mark.parametrize(
    ("sizes", "dim"),
    [
        pytest.param({}, 64, id="half by default"),
        pytest.param({"partial_rotary_factor": 0.25}, 32, id="at the top"),
        pytest.param({"rope_parameters": {"partial_rotary_factor": 1.0}}, 128, id="nested"),
    ],
)
def test_glm_turns_a_share_of_each_head(sizes: dict[str, object], dim: int) -> None:
    rotary = attentions(read("glm", **sizes))[0].rotary
    assert rotary is not None
    assert rotary.dim == dim


def test_hyperclovax_without_post_norms_is_granite() -> None:
    model = read("hyperclovax", use_post_norm=False)
    assert model.stacks[0].runs[0].layer.placement is NormPlacement.PRE
    operations = [[each.kind for each in segment.operations] for segment in record(model).segments]
    granite = record(read("granite")).segments
    assert operations == [[each.kind for each in segment.operations] for segment in granite]


def test_seed_oss_drops_out_by_default() -> None:
    model = read("seed_oss")
    assert model.stacks[0].runs[0].layer.dropout == 0.1
    assert attentions(model)[0].query_bias
    assert not attentions(model)[0].output_bias


@pytest.mark.parametrize(
    ("model_type", "sizes", "key"),
    [
        pytest.param("olmo3", {"layer_types": ["full_attention"]}, "layer_types", id="too few"),
        pytest.param("olmo3", {"layer_types": ["linear"] * 4}, "layer_types", id="unknown"),
        pytest.param("smollm3", {"no_rope_layers": [1]}, "no_rope_layers", id="too few flags"),
        pytest.param("glm", {"partial_rotary_factor": 0.0}, "partial_rotary_factor", id="nothing"),
        pytest.param(
            "glm", {"rope_parameters": {"partial_rotary_factor": float("nan")}},
            "rope_parameters.partial_rotary_factor", id="no number",
        ),
        pytest.param("helium", {"head_dim": 16}, "head_dim", id="heads do not fill the width"),
        pytest.param("cohere2", {"hidden_size": 65}, "hidden_size", id="heads do not divide"),
    ],
)  # fmt: skip
def test_refused(model_type: str, sizes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}: "):
        read(model_type, **sizes)


def mask_bytes(tape: Tape, name: str) -> list[int]:
    return [
        output.storage.num_bytes
        for operation in tape.segments[0].operations
        if operation.name == name
        for output in operation.outputs
    ]


def test_a_window_that_the_sequence_does_not_fill_needs_no_mask() -> None:
    model = read("phi3", sliding_window=129)
    assert mask_bytes(record(model), "bitwise_and") == []
    assert mask_bytes(record(model, seq_len=129), "bitwise_and") == [16_896, 16_896]


def test_eager_masks_are_written_out_for_every_sequence() -> None:
    gemma = record(read("gemma2"), attention="eager")
    assert mask_bytes(gemma, "where") == [2 * 128 * 128 * 2] * 2


def test_gemma2_has_no_sdpa_even_without_a_softcap() -> None:
    names = [
        {each.name for each in record(model).segments[1].operations}
        for model in (read("gemma2", attn_logit_softcapping=None), read("gemma"))
    ]
    assert ["softmax" in found for found in names] == [True, False]


def test_a_single_key_head_is_not_copied() -> None:
    operations = {
        count: {each.name for each in record(model, attention="eager").segments[1].operations}
        for count in (1, 2)
        for model in [read("gemma", num_key_value_heads=count)]
    }
    assert "repeat_kv" not in operations[1]
    assert "repeat_kv" in operations[2]


def test_code_world_model_looks_at_all_tokens_in_every_fourth_layer() -> None:
    """``CwmConfig.__post_init__``: the first layer is one of these."""
    windows = [each.sliding_window for each in attentions(read("cwm", num_hidden_layers=5))]
    assert windows == [None, 8192, 8192, 8192, None]
    types = ["sliding_attention", "full_attention"]
    named = read("cwm", num_hidden_layers=2, layer_types=types, sliding_window=16)
    assert [each.sliding_window for each in attentions(named)] == [16, None]
