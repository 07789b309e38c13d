"""Voices made of tokens: CSM, whose codes Mimi makes, and CLVP; counted alone.

(transformers 5.23: models/csm, models/clvp)
"""

from typing import ClassVar

from memplan.classes.llama import LayerKind, LlamaDecoderLayer
from memplan.classes.sounds.base import SoundModel, SoundTask
from memplan.classes.sounds.codecs import SAMPLING_RATE, CodecStates, MimiModel
from memplan.families.classes import BARE
from memplan.families.nesting import PartSpec, read_part
from memplan.graph.modules.basic import Conv1D, Embedding, LayerNorm, Linear, RMSNorm
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.grids import GroupNorm
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole

GENERATION = "ForConditionalGeneration"


def part(config: ConfigReader, key: str, kind: str = "") -> ConfigReader:
    """A nested config, of a class that may be given."""
    return read_part(config, PartSpec(key=key, model_type=kind)).reader


class VoiceModel(SoundModel):
    """Tokens in, tokens of speech out."""

    def context_length(self, config: ConfigReader) -> int:
        """Of those."""
        return config.integer("max_position_embeddings")


class WithHead(CodecStates):
    """The matrix of logits comes first."""

    def add_head(self, config: ConfigReader) -> None:
        """Declare it."""
        base = self.children.pop(self.prefix)
        assert isinstance(base, SoundModel)
        self.lm_head = Linear(base.width, config.integer("vocab_size"), role=WeightRole.OUTPUT)
        self.children[self.prefix] = base


class CsmStack(Module):
    """Layers as Llama's, and their norm."""

    def __init__(self, config: ConfigReader, segment: str) -> None:
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.layers = LayerList(segment, kinds, lambda kind: LlamaDecoderLayer(config, kind))
        self.norm = RMSNorm(config.integer("hidden_size"))


class CsmBackboneModelEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        rows = config.integer("num_codebooks") * config.integer("codebook_size", "vocab_size")
        self.embed_audio_tokens = Embedding(rows, config.integer("hidden_size"))


class CsmBackboneModel(CsmStack):
    def __init__(self, config: ConfigReader) -> None:
        self.embed_tokens = CsmBackboneModelEmbeddings(config)
        super().__init__(config, "backbone.layers")


class CsmDepthDecoderModel(CsmStack):
    def __init__(self, config: ConfigReader) -> None:
        outer = config.integer("backbone_hidden_size")
        rows = config.integer("num_codebooks") * config.integer("vocab_size")
        self.embed_tokens = Embedding(rows, outer)
        super().__init__(config, "depth_decoder.layers")
        self.inputs_embeds_projector = Linear(outer, config.integer("hidden_size"))


class CsmCodebooksHead(Module):
    """A head for each codebook behind the first."""

    def __init__(self, config: ConfigReader) -> None:
        count, size = config.integer("num_codebooks") - 1, config.integer("hidden_size")
        self.weight = Weight(count, size, config.integer("vocab_size"))


class CsmDepthDecoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.model = CsmDepthDecoderModel(config)
        self.codebooks_head = CsmCodebooksHead(config)


class CsmModel(VoiceModel):
    """A Llama over text and codebooks, a smaller one over the codebooks of a frame, Mimi."""

    endings: ClassVar[dict[str, type[SoundTask]]] = {GENERATION: WithHead, BARE: WithHead}
    part_types = "csm_depth_decoder_model", "mimi"

    def __init__(self, config: ConfigReader) -> None:
        self.vocab_size, self.width = config.integer("vocab_size"), config.integer("hidden_size")
        self.embed_text_tokens = Embedding(config.integer("text_vocab_size"), self.width)
        self.backbone_model = CsmBackboneModel(config)
        self.depth_decoder = CsmDepthDecoder(part(config, "depth_decoder_config"))
        self.codec_model = MimiModel(part(config, "codec_config", "mimi"), "codec.")
        self.codec_model.begins_names = False
        self.is_tied = config.flag("tie_codebooks_embeddings", default=True)
        if self.is_tied:
            table = self.backbone_model.embed_tokens.embed_audio_tokens
            self.depth_decoder.model.embed_tokens.weight = table.weight
        self.sound = self.described(0, SAMPLING_RATE, SAMPLING_RATE)


class ClvpSelfAttention(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, bias = config.integer("hidden_size"), config.flag("use_attention_bias")
        for name in ("k", "v", "q"):
            role = WeightRole.MATRIX if name == "v" else WeightRole.QUERY_KEY
            setattr(self, f"{name}_proj", Linear(size, size, bias=bias, role=role))
        self.out_proj = Linear(size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)


class ClvpConditioningEncoder(Module):
    def __init__(self, text: ConfigReader, config: ConfigReader) -> None:
        size, name = config.integer("hidden_size"), "conditioning_encoder"
        self.text_token_embedding = Embedding(text.integer("vocab_size"), size)
        self.text_position_embedding = Embedding(config.integer("max_text_tokens"), size)
        self.mel_conv = Conv1d(config.integer("feature_size"), size, 1)
        kinds = [0] * config.layers("num_mel_attn_blocks")
        self.group_norms = LayerList(f"{name}.norms", kinds, lambda _: GroupNorm(1, size))
        made = LayerList(f"{name}.layers", kinds, lambda _: ClvpSelfAttention(config))
        self.mel_attn_blocks = made


class ClvpDecoderMLP(Module):
    def __init__(self, size: int, inner: int) -> None:
        self.c_fc, self.c_proj = Conv1D(size, inner), Conv1D(inner, size)


class ClvpDecoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        self.input_layernorm, self.attn = LayerNorm(size), ClvpSelfAttention(config)
        self.post_attention_layernorm = LayerNorm(size)
        self.mlp = ClvpDecoderMLP(size, config.integer("n_inner", default=4 * size))


class ClvpDecoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, rows = config.integer("hidden_size"), config.integer("vocab_size")
        self.input_embeds_layer = Embedding(rows, size)
        longest = config.integer("max_position_embeddings")
        self.position_embeds_layer = Embedding(longest, size)
        kinds = [0] * config.layers("num_hidden_layers")
        self.layers = LayerList("speech_decoder.layers", kinds, lambda _: ClvpDecoderLayer(config))
        self.layer_norm = LayerNorm(size)


class ClvpForCausalLM(Module):
    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        setattr(self, "model.decoder", ClvpDecoder(config))
        self.final_norm = LayerNorm(size)
        self.lm_head = Linear(size, config.integer("vocab_size"), bias=True)


class ClvpGatedLinearUnit(Module):
    def __init__(self, size: int, inner: int) -> None:
        self.proj = Linear(size, 2 * inner, bias=True)


class ClvpEncoderMLP(Module):
    def __init__(self, size: int, inner: int) -> None:
        self.fc1, self.fc2 = ClvpGatedLinearUnit(size, inner), Linear(inner, size, bias=True)


class ClvpEncoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        self.self_attn = ClvpSelfAttention(config)
        self.mlp = ClvpEncoderMLP(size, config.integer("intermediate_size"))
        self.input_rmsnorm, self.post_attention_rmsnorm = RMSNorm(size), RMSNorm(size)


class ClvpEncoder(Module):
    """It ranks what was made."""

    def __init__(self, config: ConfigReader, name: str) -> None:
        size = config.integer("hidden_size")
        self.token_embedding = Embedding(config.integer("vocab_size"), size)
        kinds = [0] * config.layers("num_hidden_layers")
        self.layers = LayerList(f"{name}.layers", kinds, lambda _: ClvpEncoderLayer(config))
        if config.flag("summary_use_proj"):
            setattr(self, "sequence_summary.summary", Linear(size, size, bias=True))
        self.final_layer_norm = LayerNorm(size)
        self.projection = Linear(size, config.integer("projection_dim"))


class ClvpModel(VoiceModel):
    """A GPT that makes speech tokens, and two encoders that rank what it made."""

    endings: ClassVar[dict[str, type[SoundTask]]] = {GENERATION: CodecStates, BARE: CodecStates}
    part_types = "clvp_encoder", "clvp_decoder"

    def __init__(self, config: ConfigReader) -> None:
        text, speech, decoder = (
            part(config, f"{each}_config") for each in ("text", "speech", "decoder")
        )
        self.logit_scale = Weight()
        self.conditioning_encoder = ClvpConditioningEncoder(text, decoder)
        self.speech_decoder_model = ClvpForCausalLM(decoder)
        self.text_encoder_model = ClvpEncoder(text, "text_encoder_model")
        self.speech_encoder_model = ClvpEncoder(speech, "speech_encoder_model")
        self.vocab_size, self.width = (
            decoder.integer(each) for each in ("vocab_size", "hidden_size")
        )
        self.longest = decoder.integer("max_position_embeddings")
        self.sound = self.described(0, SAMPLING_RATE, SAMPLING_RATE)

    def context_length(self, config: ConfigReader) -> int:
        """Of speech."""
        del config
        return self.longest
