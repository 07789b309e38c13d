"""Voices made of tokens: CSM, whose codes Mimi makes, and CLVP; counted alone.

(transformers 5.23: models/csm, models/clvp)
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from memplan.classes.llama import LayerKind, LlamaDecoderLayer
from memplan.classes.sensed.counted import Parts
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
        self.lm_head = Linear(
            self.spec.hidden_size, config.integer("vocab_size"), role=WeightRole.OUTPUT
        )
        self.children[self.prefix] = base


def csm_stack(config: ConfigReader, segment: str) -> dict[str, Module]:
    """Layers as Llama's, and their norm."""
    kinds = [LayerKind()] * config.layers("num_hidden_layers")
    layers = LayerList(segment, kinds, lambda kind: LlamaDecoderLayer(config, kind))
    return {"layers": layers, "norm": RMSNorm(config.integer("hidden_size"))}


class CsmModel(VoiceModel):
    """A Llama over text and codebooks, a smaller one over the codebooks of a frame, Mimi."""

    endings: ClassVar[dict[str, type[SoundTask]]] = {GENERATION: WithHead, BARE: WithHead}
    part_types = "csm_depth_decoder_model", "mimi"

    def __init__(self, config: ConfigReader) -> None:
        self.vocab, self.width = config.integer("vocab_size"), config.integer("hidden_size")
        self.embed_text_tokens = Embedding(config.integer("text_vocab_size"), self.width)
        count, depth = config.integer("num_codebooks"), part(config, "depth_decoder_config")
        table = Embedding(count * config.integer("codebook_size", "vocab_size"), self.width)
        self.backbone_model = Parts(
            embed_tokens=Parts(embed_audio_tokens=table), **csm_stack(config, "backbone.layers")
        )
        count, rows = depth.integer("num_codebooks"), depth.integer("vocab_size")
        size, outer = depth.integer("hidden_size"), depth.integer("backbone_hidden_size")
        again = Embedding(count * rows, outer)
        self.depth_decoder = Parts(
            model=Parts(
                embed_tokens=again, **csm_stack(depth, "depth_decoder.layers"),
                inputs_embeds_projector=Linear(outer, size),
            ),
            codebooks_head=Parts(weight=Weight(count - 1, size, rows)),
        )  # fmt: skip
        self.codec_model = MimiModel(part(config, "codec_config", "mimi"), "codec.")
        self.codec_model.begins_names = False
        self.tied = config.flag("tie_codebooks_embeddings")
        if self.tied:
            again.weight = table.weight
        self.sound = self.described(0, SAMPLING_RATE, SAMPLING_RATE)


class ClvpSelfAttention(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, bias = config.integer("hidden_size"), config.flag("use_attention_bias")
        for name in ("k", "v", "q"):
            role = WeightRole.MATRIX if name == "v" else WeightRole.QUERY_KEY
            setattr(self, f"{name}_proj", Linear(size, size, bias=bias, role=role))
        self.out_proj = Linear(size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)


def layer_list(
    config: ConfigReader, key: str, segment: str, made: Callable[[], Module]
) -> LayerList:
    """As many layers as the config says."""
    return LayerList(segment, [None] * config.layers(key), lambda _: made())


class ClvpDecoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        self.input_layernorm, self.attn = LayerNorm(size), ClvpSelfAttention(config)
        self.post_attention_layernorm = LayerNorm(size)
        inner = config.integer("n_inner", default=4 * size)
        self.mlp = Parts(c_fc=Conv1D(size, inner), c_proj=Conv1D(inner, size))


class ClvpEncoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.self_attn = ClvpSelfAttention(config)
        gated = Parts(proj=Linear(size, 2 * inner, bias=True))
        self.mlp = Parts(fc1=gated, fc2=Linear(inner, size, bias=True))
        self.input_rmsnorm, self.post_attention_rmsnorm = RMSNorm(size), RMSNorm(size)


class ClvpEncoder(Module):
    """It ranks what was made."""

    def __init__(self, config: ConfigReader, name: str) -> None:
        size, make = config.integer("hidden_size"), partial(ClvpEncoderLayer, config)
        self.token_embedding = Embedding(config.integer("vocab_size"), size)
        self.layers = layer_list(config, "num_hidden_layers", f"{name}.layers", make)
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
        rows, size = decoder.integer("vocab_size"), decoder.integer("hidden_size")
        self.vocab, self.width = rows, size
        self.longest = decoder.integer("max_position_embeddings")
        blocks, name = "num_mel_attn_blocks", "conditioning_encoder"
        attention = partial(ClvpSelfAttention, decoder)
        self.conditioning_encoder = Parts(
            text_token_embedding=Embedding(text.integer("vocab_size"), size),
            text_position_embedding=Embedding(decoder.integer("max_text_tokens"), size),
            mel_conv=Conv1d(decoder.integer("feature_size"), size, 1),
            group_norms=layer_list(decoder, blocks, f"{name}.norms", partial(GroupNorm, 1, size)),
            mel_attn_blocks=layer_list(decoder, blocks, f"{name}.layers", attention),
        )
        make = partial(ClvpDecoderLayer, decoder)
        inner = Parts(
            input_embeds_layer=Embedding(rows, size),
            position_embeds_layer=Embedding(self.longest, size),
            layers=layer_list(decoder, "num_hidden_layers", "speech_decoder.layers", make),
            layer_norm=LayerNorm(size),
        )
        self.speech_decoder_model = Parts(
            model=Parts(decoder=inner), final_norm=LayerNorm(size),
            lm_head=Linear(size, rows, bias=True),
        )  # fmt: skip
        self.text_encoder_model = ClvpEncoder(text, "text_encoder_model")
        self.speech_encoder_model = ClvpEncoder(speech, "speech_encoder_model")
        self.sound = self.described(0, SAMPLING_RATE, SAMPLING_RATE)

    def context_length(self, config: ConfigReader) -> int:
        """Of speech."""
        del config
        return self.longest
