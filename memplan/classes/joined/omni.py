"""Qwen2.5-Omni: a thinker that sees; what it hears and speaks with is idle where samples have pictures alone.

(transformers 5.23, models/qwen2_5_omni/modeling_qwen2_5_omni.py)
"""

from typing import Any

from memplan.classes.joined.packed import SeparateAttention
from memplan.classes.joined.qwen_vl import Qwen25VLVisionModel, VisualModel
from memplan.classes.llama import LayerKind, Qwen2DecoderLayer
from memplan.classes.pictures.parts import InOrder
from memplan.families.nesting import PartSpec, read_part
from memplan.families.request import checkpoint_dtype
from memplan.families.towers.sizes import each_stage, ratio
from memplan.fast_dataclass import replace
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear, RMSNorm
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.spec import ModelSpec

TIME_FEATURES = 256
"""Sinusoids that tell a step of the diffusion (``DiTTimestepEmbedding``)."""
WAVE_KERNEL = 7
"""Of the first and the last convolution of the vocoder."""
DILATIONS = 3
"""Of a residual block's convolutions, each of which has another behind it (``Qwen2_5OmniAMPBlock``)."""


class OmniVisionAttention(SeparateAttention):
    names = "q", "k", "v", "proj"
    reads = "q", "k", "v"
    output = "proj"


class OmniVisionModel(Qwen25VLVisionModel):
    attention_class = OmniVisionAttention


class Idle(InOrder):
    """What nothing runs through, in the order in which the class declares it."""

    def __init__(self, tower: str = "", /, **named: Module) -> None:
        self.tower = tower
        """How the names of its segments begin."""
        super().__init__(**named)


def linear(inputs: int, outputs: int) -> Linear:
    """With a bias, as most of these are."""
    return Linear(inputs, outputs, bias=True)


def listed(tower: str, count: int, layer: Any) -> LayerList:
    """Layers of a part."""
    return LayerList(f"{tower}.layers", [None] * count, lambda _: layer())


def numbered(*modules: Module) -> InOrder:
    """``torch.nn.ModuleList``."""
    return InOrder(**{f"_{number}": each for number, each in enumerate(modules)})


def audio_encoder(config: ConfigReader) -> Idle:
    """Whisper's layers, a linear layer to the language model's width."""
    size, inner, outputs = (
        config.integer(key) for key in ("d_model", "encoder_ffn_dim", "output_dim")
    )

    def layer() -> Module:
        return Idle(
            self_attn=Idle(
                k_proj=Linear(size, size), v_proj=linear(size, size), q_proj=linear(size, size),
                out_proj=linear(size, size),
            ),
            self_attn_layer_norm=LayerNorm(size), fc1=linear(size, inner), fc2=linear(inner, size),
            final_layer_norm=LayerNorm(size),
        )  # fmt: skip

    return Idle(
        "audio_tower",
        conv1=Conv1d(config.integer("num_mel_bins"), size, 3), conv2=Conv1d(size, size, 3),
        audio_bos_eos_token=Embedding(2, outputs),
        layers=listed("audio_tower", config.layers("encoder_layers"), layer),
        ln_post=LayerNorm(size), proj=linear(size, outputs),
    )  # fmt: skip


def talker(config: ConfigReader) -> Idle:
    """A Qwen2 over codes of sound, fed with the thinker's hidden states."""
    size, given = config.integer("hidden_size"), config.integer("embedding_size")
    words = config.integer("vocab_size")
    count = config.layers("num_hidden_layers")
    layers = listed("talker", count, lambda: Qwen2DecoderLayer(config, LayerKind()))
    model = Idle(embed_tokens=Embedding(words, given), layers=layers, norm=RMSNorm(size))
    return Idle(
        "talker", thinker_to_talker_proj=linear(given, size), model=model,
        codec_head=Linear(size, words),
    )  # fmt: skip


def diffusion(config: ConfigReader) -> Idle:
    """A diffusion transformer from codes to spectra."""
    size, mel, codes = (config.integer(key) for key in ("hidden_size", "mel_dim", "emb_dim"))
    width = config.integer("head_dim") * config.integer("num_attention_heads")
    inner = int(size * ratio(config, "ff_mult"))
    inputs = mel + config.integer("enc_dim") + config.integer("enc_emb_dim") + codes

    def layer() -> Module:
        return Idle(
            attn_norm=Idle(linear=linear(size, 6 * size)),
            attn=Idle(
                to_q=linear(size, width), to_k=linear(size, width), to_v=linear(size, width),
                to_out=Idle(_0=linear(width, size)),
            ),
            ff=Idle(ff=Idle(_0=linear(size, inner), _3=linear(inner, size))),
        )  # fmt: skip

    return Idle(
        time_embed=Idle(time_mlp=Idle(_0=linear(TIME_FEATURES, size), _2=linear(size, size))),
        text_embed=Idle(codec_embed=Embedding(config.integer("num_embeds") + 1, codes)),
        input_embed=Idle(proj=linear(inputs, size), spk_encoder=speaker(config, mel)),
        transformer_blocks=listed("token2wav", config.layers("num_hidden_layers"), layer),
        norm_out=Idle(linear=linear(size, 2 * size)), proj_out=linear(size, mel),
    )  # fmt: skip


def delay(*sizes: int) -> Idle:
    """``TimeDelayNetBlock``."""
    return Idle(conv=Conv1d(*sizes))


def speaker(config: ConfigReader, mel: int) -> Idle:
    """ECAPA-TDNN: who speaks, told from a spectrum (``ECAPA_TimeDelayNet``)."""
    widths = config.integers("enc_channels", minimum=1)
    kernels = each_stage(config, "enc_kernel_sizes", len(widths))
    squeezed, parts = config.integer("enc_se_channels"), config.integer("enc_res2net_scale")
    last, attended = widths[-1], config.integer("enc_attention_channels")

    def block(inputs: int, width: int, kernel: int) -> Idle:
        part = width // parts
        return Idle(
            tdnn1=delay(inputs, width, 1),
            res2net_block=Idle(blocks=numbered(*(delay(part, part, kernel) for _ in range(parts - 1)))),
            tdnn2=delay(width, width, 1),
            se_block=Idle(conv1=Conv1d(width, squeezed, 1), conv2=Conv1d(squeezed, width, 1)),
        )  # fmt: skip

    middle = (
        block(*each) for each in list(zip(widths, widths[1:], kernels[1:], strict=False))[:-1]
    )
    return Idle(
        blocks=numbered(delay(mel, widths[0], kernels[0]), *middle),
        mfa=delay(last, last, kernels[-1]),
        asp=Idle(tdnn=delay(3 * last, attended, 1), conv=Conv1d(attended, last, 1)),
        fc=Conv1d(2 * last, config.integer("enc_dim"), 1),
    )  # fmt: skip


class SnakeBeta(Module):
    def __init__(self, width: int) -> None:
        self.alpha, self.beta = Weight(width), Weight(width)


class ConvTranspose1d(Module):
    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        self.weight, self.bias = Weight(inputs, outputs, kernel), Weight(outputs)


def vocoder(config: ConfigReader) -> Idle:
    """BigVGAN: spectra to waves, each layer longer and half as wide."""
    first = config.integer("upsample_initial_channel")
    steps = each_stage(
        config, "upsample_kernel_sizes", len(config.integers("upsample_rates", minimum=1))
    )
    kernels = config.integers("resblock_kernel_sizes", minimum=1)
    widths = [first >> number for number in range(len(steps) + 1)]

    def block(width: int, kernel: int) -> Idle:
        convolutions = (
            numbered(*(Conv1d(width, width, kernel) for _ in range(DILATIONS))) for _ in range(2)
        )
        snakes = (Idle(act=SnakeBeta(width)) for _ in range(2 * DILATIONS))
        return Idle(
            convs1=next(convolutions), convs2=next(convolutions), activations=numbered(*snakes)
        )

    pairs = zip(widths, widths[1:], steps, strict=False)
    return Idle(
        conv_pre=Conv1d(config.integer("mel_dim"), first, WAVE_KERNEL),
        ups=numbered(*(numbered(ConvTranspose1d(*each)) for each in pairs)),
        resblocks=numbered(*(block(width, kernel) for width in widths[1:] for kernel in kernels)),
        activation_post=Idle(act=SnakeBeta(widths[-1])),
        conv_post=Conv1d(widths[-1], 1, WAVE_KERNEL, bias=False),
    )  # fmt: skip


class OmniModel(VisualModel):
    unseen = "audio_tower", "talker", "token2wav"

    def __init__(self, config: ConfigReader) -> None:
        self.thinker = thinker(config)
        self.audio_tower = audio_encoder(part(self.thinker, "audio_config"))
        super().__init__(self.thinker)
        if config.flag("enable_audio_output"):
            self.talker = talker(part(config, "talker_config"))
            waves = part(config, "token2wav_config")
            self.token2wav = Idle(
                "token2wav", code2wav_dit_model=diffusion(part(waves, "dit_config")),
                code2wav_bigvgan_model=vocoder(part(waves, "bigvgan_config")),
            )  # fmt: skip

    @classmethod
    def named_task(cls, config: ConfigReader, model: ModelSpec) -> type[Any] | None:
        return super().named_task(thinker(config), model)

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        del config
        return super().ties_head(self.thinker, tied)

    def told(self, model: ModelSpec, task: Task | None) -> ModelSpec:
        """The thinker's config says how weights are held."""
        del task
        if self.thinker.raw("dtype", "torch_dtype") is None:
            return model
        return replace(model, checkpoint_dtype=checkpoint_dtype(self.thinker))


def part(config: ConfigReader, key: str) -> ConfigReader:
    """A nested config."""
    return read_part(config, PartSpec(key=key)).reader


def thinker(config: ConfigReader) -> ConfigReader:
    """The config of what is trained."""
    return part(config, "thinker_config")
