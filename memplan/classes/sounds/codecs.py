"""Codecs of sound, EnCodec and Mimi: what makes codes of a signal and a signal of codes. Codebooks are buffers.

(transformers 5.23: models/encodec, models/mimi)
"""

import math
from typing import ClassVar

from memplan.classes.llama import LayerKind, LlamaAttention
from memplan.classes.sensed.counted import Parts
from memplan.classes.sounds.base import SoundModel, SoundStates, SoundTask
from memplan.families.classes import BARE
from memplan.families.towers.sizes import few
from memplan.graph.modules.basic import LayerNorm, Linear
from memplan.graph.modules.grids import GroupNorm
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader

SAMPLING_RATE = 24_000
"""Where the config says none (``MimiConfig``, ``EncodecConfig``) [Hz]."""
MAX_RATE = 1e6
NORMS = {"": "", "weight_norm": "weight", "time_group_norm": "group"}


class CodecStates(SoundStates):
    """Its codes and its signal; counted alone."""

    is_counted = True


class Kernel(Module):
    """The weight of a convolution, of either way; or a length for each entry of its first dimension, and a direction."""

    def __init__(self, *shape: int, outputs: int = 0, norm: str = "", turned: bool = False) -> None:
        shape = (shape[1], shape[0], shape[2]) if turned else shape
        if norm != "weight":
            self.weight = Weight(*shape)
        if outputs:
            self.bias = Weight(outputs)
        if norm == "weight":
            both = Parts(original0=Weight(shape[0], 1, 1), original1=Weight(*shape))
            setattr(self, "parametrizations.weight", both)


class CodecConv(Module):
    """A convolution, or the other way round (``turned``), and perhaps a norm."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, norm: str, *, turned: bool = False
    ) -> None:
        self.conv = Kernel(outputs, inputs, kernel, outputs=outputs, norm=norm, turned=turned)
        if norm == "group":
            self.norm = GroupNorm(1, outputs)


class ResnetBlock(Module):
    """Two convolutions, narrower between, beside a shortcut that may be one too."""

    def __init__(self, config: ConfigReader, width: int, norm: str, *, shortcut: bool) -> None:
        narrow = width // config.integer("compress")
        kernel = config.integer("residual_kernel_size")
        setattr(self, "block.1", CodecConv(width, narrow, kernel, norm))
        setattr(self, "block.3", CodecConv(narrow, width, 1, norm))
        if config.flag("use_conv_shortcut", default=shortcut):
            self.shortcut = CodecConv(width, width, 1, norm)


class Gates(Module):
    """``torch.nn.LSTM``: one module has the four gates of all its layers."""

    def __init__(self, size: int, count: int) -> None:
        for index in range(count):
            for name, shape in (("weight", (4 * size, size)), ("bias", (4 * size,))):
                setattr(self, f"{name}_ih_l{index}", Weight(*shape))
                setattr(self, f"{name}_hh_l{index}", Weight(*shape))


class SeaNet(Module):
    """Either half; they mirror each other."""

    ratios: tuple[int, ...] = (8, 5, 4, 2)
    """Where the config has none."""
    remembers = True
    """LSTMs stand between the halves."""

    def __init__(self, config: ConfigReader, *, decodes: bool) -> None:
        self.norm = self.norm_of(config)
        channels, size = config.integer("audio_channels"), config.integer("hidden_size")
        width, kernel = config.integer("num_filters"), config.integer("kernel_size")
        times = self.upsampling(config)
        widest, last = width * 2 ** len(times), config.integer("last_kernel_size")
        middle: list[Module | None] = []
        if self.remembers:
            middle = [Parts(lstm=Gates(widest, few(config, "num_lstm_layers")))]
        ends = (channels, width), (widest, size)
        if decodes:
            found = [self.conv(size, widest, kernel), *middle]
            for each in times:
                found += [None, self.conv(widest, widest // 2, 2 * each, turned=True)]
                widest //= 2
                found += self.blocks(config, widest)
        else:
            found = [self.conv(*ends[0], kernel)]
            for each in reversed(times):
                found += [*self.blocks(config, width), None]
                found.append(self.conv(width, 2 * width, 2 * each))
                width *= 2
            found += middle
        first, second = ends[0][::-1] if decodes else ends[1]
        found += [None, self.conv(first, second, last)]
        for index, module in enumerate(found):
            if module is not None:
                setattr(self, f"layers.{index}", module)

    def norm_of(self, config: ConfigReader) -> str:
        """Of its convolutions."""
        return NORMS[config.choice("norm_type", config.text("norm_type"), tuple(NORMS)[1:])]

    def conv(self, inputs: int, outputs: int, kernel: int, *, turned: bool = False) -> Module:
        """A convolution."""
        return CodecConv(inputs, outputs, kernel, self.norm, turned=turned)

    def blocks(self, config: ConfigReader, width: int) -> list[Module | None]:
        """What stands between two widths."""
        return [
            ResnetBlock(config, width, self.norm, shortcut=self.remembers)
            for _ in range(few(config, "num_residual_layers"))
        ]

    @classmethod
    def upsampling(cls, config: ConfigReader) -> list[int]:
        """How many times longer the signal becomes in each stage of the decoder."""
        return config.integers("upsampling_ratios", minimum=1) or list(cls.ratios)


class EncodecModel(SoundModel):
    endings: ClassVar[dict[str, type[SoundTask]]] = {BARE: CodecStates}

    def __init__(self, config: ConfigReader) -> None:
        self.encoder, self.decoder = (SeaNet(config, decodes=each) for each in (False, True))
        self.width = config.integer("hidden_size")
        self.sound = self.described(config.integer("audio_channels"), SAMPLING_RATE, SAMPLING_RATE)

    def context_length(self, config: ConfigReader) -> int:
        """None."""
        del config
        return 1


class MimiSeaNet(SeaNet):
    ratios, remembers = (8, 6, 5, 4), False

    def norm_of(self, config: ConfigReader) -> str:
        """None."""
        del config
        return ""


class MimiTransformerLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.self_attn = LlamaAttention(config, LayerKind())
        self.mlp = Parts(fc1=Linear(size, inner), fc2=Linear(inner, size))
        self.input_layernorm, self.post_attention_layernorm = LayerNorm(size), LayerNorm(size)
        self.self_attn_layer_scale = Parts(scale=Weight(size))
        self.mlp_layer_scale = Parts(scale=Weight(size))


class MimiModel(SoundModel):
    """Two halves, each with a transformer, and two quantizers between."""

    endings: ClassVar[dict[str, type[SoundTask]]] = {BARE: CodecStates}

    def __init__(self, config: ConfigReader, before: str = "") -> None:
        size, stride = config.integer("hidden_size"), latent_stride(config)
        first, last = (
            self.transformer(config, f"{before}{each}") for each in ("encoder", "decoder")
        )
        self.width, down, up = size, {}, {}
        if stride:
            groups = config.integer("upsample_groups")
            narrow = config.divide("hidden_size", size, "upsample_groups", groups)
            down["downsample"] = Parts(conv=Kernel(size, size, 2 * stride))
            up["upsample"] = Parts(conv=Kernel(size, narrow, 2 * stride))
        encoder, decoder = (MimiSeaNet(config, decodes=each) for each in (False, True))
        self.encoder = Parts(encoder_seanet=encoder, encoder_transformer=first, **down)
        self.decoder = Parts(**up, decoder_transformer=last, decoder_seanet=decoder)
        inner = config.integer("vector_quantization_hidden_dimension")
        for name in ("semantic", "acoustic") if inner != size else ():
            made = Parts(input_proj=Kernel(inner, size, 1), output_proj=Kernel(size, inner, 1))
            setattr(self, f"quantizer.{name}_residual_vector_quantizer", made)
        self.sound = self.described(config.integer("audio_channels"), SAMPLING_RATE, SAMPLING_RATE)

    def transformer(self, config: ConfigReader, name: str) -> Parts:
        """Layers."""
        kinds = [None] * config.layers("num_hidden_layers")
        made = LayerList(f"{name}.layers", kinds, lambda _: MimiTransformerLayer(config))
        return Parts(layers=made)

    def context_length(self, config: ConfigReader) -> int:
        """Frames."""
        return config.integer("max_position_embeddings")


def latent_stride(config: ConfigReader) -> int:
    """How many of SEANet's frames make one of the codec's; 0 where they are the same.

    Without ``frame_rate`` there are half as many (``MimiConfig.frame_size``).
    """
    rate = config.number("sampling_rate", default=SAMPLING_RATE, maximum=MAX_RATE)
    hop = math.prod(MimiSeaNet.upsampling(config))
    inner = math.ceil(rate / hop)
    outer = config.number("frame_rate", maximum=MAX_RATE) or rate / (2 * hop)
    return 0 if inner == outer else int(inner / outer)
