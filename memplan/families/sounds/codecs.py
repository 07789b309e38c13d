"""Models of sound that are no encoders alone: the codecs EnCodec and Mimi, CSM and CLVP."""

from collections.abc import Callable

from memplan.families.classes import BARE, dispatch, whole_model
from memplan.families.nesting import PartSpec, read_part
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import perceptron
from memplan.families.towers.parts import attention
from memplan.families.towers.sounds.mimi import mimi_tower
from memplan.families.towers.sounds.seanet import (
    SeanetKind,
    group_normed,
    group_normed_transposed,
    seanet,
    weight_normed,
    weight_normed_transposed,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec

GENERATION = "ForConditionalGeneration"
AUDIO_TABLE = "backbone.embed_audio_tokens"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _encodec(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """EnCodec; its codebooks are buffers."""
    norm = reader.choice("norm_type", reader.text("norm_type"), _ENCODEC_KINDS)

    def declare(table: ParameterTable, _ending: str) -> None:
        seanet(table, "", reader, _ENCODEC_KINDS[norm])

    return whole_model(
        reader, request, (BARE,), declare,
        hidden_size=reader.integer("hidden_size"), context_length=1,
    )  # fmt: skip


_ENCODEC_KINDS: dict[str, SeanetKind] = {
    "weight_norm": SeanetKind(
        convolution=weight_normed, transposed=weight_normed_transposed, lstm=True
    ),
    "time_group_norm": SeanetKind(
        convolution=group_normed, transposed=group_normed_transposed, lstm=True
    ),
}


def _mimi(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    def declare(table: ParameterTable, _ending: str) -> None:
        mimi_tower(table, "", reader)

    return whole_model(
        reader, request, (BARE,), declare,
        hidden_size=reader.integer("hidden_size"),
        context_length=reader.integer("max_position_embeddings"),
    )  # fmt: skip


def _csm(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CSM: a Llama over text and codebooks, a smaller one over the codebooks of a frame, Mimi."""
    depth = read_part(reader, PartSpec(key="depth_decoder_config")).reader
    codec = read_part(reader, PartSpec(key="codec_config", model_type="mimi")).reader
    size = reader.integer("hidden_size")

    def declare(table: ParameterTable, _ending: str) -> None:
        codebooks = reader.integer("num_codebooks")
        with table.block("embed"):
            table.embedding("embed_text_tokens", reader.integer("text_vocab_size"), size)
            audio_rows = codebooks * reader.integer("codebook_size", "vocab_size")
            table.embedding(AUDIO_TABLE, audio_rows, size)
        with table.block("backbone.layers", count=reader.layers("num_hidden_layers")):
            _llama_layer(table, reader)
        with table.block("head"):
            table.norm("backbone.norm", size, bias=False)
            table.linear("lm_head", size, reader.integer("vocab_size"), bias=False)
        _depth_decoder(table, depth)
        mimi_tower(table, "codec.", codec)

    return whole_model(
        reader, request, (GENERATION,), declare,
        hidden_size=size, vocab_size=reader.integer("vocab_size"),
        context_length=reader.integer("max_position_embeddings"),
        tied=reader.flag("tie_codebooks_embeddings", default=True),
    )  # fmt: skip


def _depth_decoder(table: ParameterTable, reader: ConfigReader) -> None:
    """``CsmDepthDecoderForCausalLM``: its table is the backbone's, a head for each later codebook."""
    size, outer = reader.integer("hidden_size"), reader.integer("backbone_hidden_size")
    vocab_size, codebooks = reader.integer("vocab_size"), reader.integer("num_codebooks")
    with table.block("depth_decoder.embed"):
        table.tied(
            "depth_decoder.embed_tokens", f"{AUDIO_TABLE}.weight", codebooks * vocab_size, outer
        )
        table.linear("inputs_embeds_projector", outer, size, bias=False)
    with table.block("depth_decoder.layers", count=reader.layers("num_hidden_layers")):
        _llama_layer(table, reader)
    with table.block("depth_decoder.head"):
        table.norm("depth_decoder.norm", size, bias=False)
        table.parameter("codebooks_head", "weight", codebooks - 1, size, vocab_size)


def _llama_layer(table: ParameterTable, reader: ConfigReader) -> None:
    size, inner = reader.integer("hidden_size"), reader.integer("intermediate_size")
    heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", default=size // heads)
    narrow = reader.integer("num_key_value_heads", default=heads) * head_dim
    bias = reader.flag("attention_bias")
    table.linear("self_attn.q_proj", size, heads * head_dim, bias=bias)
    table.linear("self_attn.k_proj", size, narrow, bias=bias)
    table.linear("self_attn.v_proj", size, narrow, bias=bias)
    table.linear("self_attn.o_proj", heads * head_dim, size, bias=bias)
    for name, before, after in (
        ("gate_proj", size, inner), ("up_proj", size, inner), ("down_proj", inner, size)
    ):  # fmt: skip
        table.linear(f"mlp.{name}", before, after, bias=reader.flag("mlp_bias"))
    table.norm("input_layernorm", size, bias=False)
    table.norm("post_attention_layernorm", size, bias=False)


def _clvp(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CLVP: a GPT that makes speech tokens, and two encoders that rank what it made."""
    text, speech, decoder = (
        read_part(reader, PartSpec(key=f"{part}_config")).reader
        for part in ("text", "speech", "decoder")
    )

    def declare(table: ParameterTable, _ending: str) -> None:
        _conditioning_encoder(table, text, decoder)
        _speech_decoder(table, decoder)
        _ranking_encoder(table, "text_encoder_model", text)
        _ranking_encoder(table, "speech_encoder_model", speech)
        with table.block("head"):
            table.parameter("model", "logit_scale")

    return whole_model(
        reader, request, (GENERATION,), declare,
        hidden_size=decoder.integer("hidden_size"), vocab_size=decoder.integer("vocab_size"),
        context_length=decoder.integer("max_position_embeddings"),
    )  # fmt: skip


def _conditioning_encoder(table: ParameterTable, text: ConfigReader, decoder: ConfigReader) -> None:
    size = decoder.integer("hidden_size")
    with table.block("conditioning_encoder.embed"):
        table.embedding("text_token_embedding", text.integer("vocab_size"), size)
        table.embedding("text_position_embedding", decoder.integer("max_text_tokens"), size)
        table.convolution("mel_conv", decoder.integer("feature_size"), size, 1)
    with table.block("conditioning_encoder.layers", count=decoder.layers("num_mel_attn_blocks")):
        table.norm("group_norm", size)
        attention(table, "attn", size, bias=decoder.flag("use_attention_bias"))


def _speech_decoder(table: ParameterTable, reader: ConfigReader) -> None:
    size = reader.integer("hidden_size")
    inner = reader.integer("n_inner", default=4 * size)
    vocab_size = reader.integer("vocab_size")
    with table.block("speech_decoder.embed"):
        table.embedding("input_embeds_layer", vocab_size, size)
        table.embedding("position_embeds_layer", reader.integer("max_position_embeddings"), size)
    with table.block("speech_decoder.layers", count=reader.layers("num_hidden_layers")):
        table.norm("input_layernorm", size)
        attention(table, "attn", size, bias=reader.flag("use_attention_bias"))
        table.norm("post_attention_layernorm", size)
        perceptron(table, "mlp", size, inner)
    with table.block("speech_decoder.head"):
        table.norm("layer_norm", size)
        table.norm("final_norm", size)
        table.linear("lm_head", size, vocab_size)


def _ranking_encoder(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``ClvpEncoder``: RMS norms and a gated network."""
    size, inner = reader.integer("hidden_size"), reader.integer("intermediate_size")
    with table.block(f"{name}.embed"):
        table.embedding("token_embedding", reader.integer("vocab_size"), size)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers")):
        attention(table, "self_attn", size, bias=reader.flag("use_attention_bias"))
        table.linear("mlp.fc1", size, 2 * inner)
        table.linear("mlp.fc2", inner, size)
        table.norm("input_rmsnorm", size, bias=False)
        table.norm("post_attention_rmsnorm", size, bias=False)
    with table.block(f"{name}.norm"):
        table.norm("final_layer_norm", size)
        table.linear("projection", size, reader.integer("projection_dim"), bias=False)
        if reader.flag("summary_use_proj"):
            table.linear("sequence_summary", size, size)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "encodec": _encodec,
    "mimi": _mimi,
    "csm": _csm,
    "clvp": _clvp,
}
