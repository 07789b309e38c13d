"""Language models of whose towers only the weights are known: Granite Speech, and Kosmos-2.5.

(transformers 5.23, modeling_*.py of models/granite_speech, models/granite_speech_plus and models/kosmos2_5)
"""

from memplan.classes.joined.base import JoinedModel, spare_segments
from memplan.classes.joined.omni import Idle, linear, listed
from memplan.classes.joined.queried import Blip2QFormerModel
from memplan.classes.sensed.counted import counted
from memplan.families.nesting import PartSpec, read_part
from memplan.fast_dataclass import replace
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear, RMSNorm
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.module import Weight
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.pictures import PictureSpec
from memplan.model.spec import ModelSpec


class CountedModel(JoinedModel):
    """Its text sees nothing of them."""

    picture = PictureSpec(channels=0, image=(0, 0))
    what: str
    """Whose activations are left out."""
    is_shown = False

    def told(self, model: ModelSpec, task: TaskKind | None) -> ModelSpec:
        del task
        left_out = f"activations of {self.what}"
        return replace(model, join=None, activations_left_out=left_out)

    def declare_unseen(self) -> None:
        for name, each in self.children.items():
            if each is not self.words:
                spare_segments(each, self.segment_of(name), counted)


def network(size: int, inner: int) -> Idle:
    """A norm, and two linear layers."""
    return Idle(
        pre_norm=LayerNorm(size), up_proj=linear(size, inner), down_proj=linear(inner, size)
    )


def conformer_block(config: ConfigReader, size: int) -> Idle:
    """``GraniteSpeechConformerBlock``."""
    heads = config.integer("num_heads")
    head_dim = config.optional_integer("dim_head")
    if head_dim is None:
        head_dim = config.divide("hidden_dim", size, "num_heads", heads)
    width, wide = head_dim * heads, size * config.integer("conv_expansion_factor")
    kernel, inner = config.integer("conv_kernel_size"), size * config.integer("feedforward_mult")
    return Idle(
        ff1=network(size, inner),
        attn=Idle(
            pre_norm=LayerNorm(size), to_q=Linear(size, width), to_kv=Linear(size, 2 * width),
            to_out=linear(width, size),
            rel_pos_emb=Embedding(2 * config.integer("max_pos_emb") + 1, head_dim),
        ),
        conv=Idle(
            norm=LayerNorm(size), up_conv=Conv1d(size, 2 * wide, 1),
            depth_conv=Conv1d(wide, wide, kernel, groups=wide, bias=False),
            batch_norm=LayerNorm(wide), down_conv=Conv1d(wide, size, 1),
        ),
        ff2=network(size, inner), post_norm=LayerNorm(size),
    )  # fmt: skip


def conformer(config: ConfigReader) -> Idle:
    """``GraniteSpeechCTCEncoder``: it classifies characters, whose scores are fed back."""
    size, outputs = config.integer("hidden_dim"), config.integer("output_dim")
    layers = listed(
        "audio_tower", config.layers("num_layers"), lambda: conformer_block(config, size)
    )
    return Idle(
        "audio_tower", input_linear=linear(config.integer("input_dim"), size), layers=layers,
        out=linear(size, outputs), out_mid=linear(outputs, size),
    )  # fmt: skip


class GraniteQFormer(Blip2QFormerModel):
    def add_tables(self, config: ConfigReader, size: int) -> None:
        super().add_tables(config, size)
        self.words = config.flag("use_qformer_text_input")


class GraniteSpeechModel(CountedModel):
    text = PartSpec(key="text_config", model_type="granite")
    what = "the audio tower and the Q-Former"

    def __init__(self, config: ConfigReader) -> None:
        self.encoder = conformer(read_part(config, PartSpec(key="encoder_config")).reader)
        part = PartSpec(key="projector_config", model_type="blip_2_qformer")
        former = read_part(config, part).reader
        count = config.integer("window_size") // config.integer("downsample_rate")
        made = GraniteQFormer(former, former.integer("encoder_hidden_size"))
        outputs = self.text_width(config)
        self.projector = Idle("qformer", qformer=made, linear=linear(made.width, outputs))
        self.projector.query = Weight(1, count, made.width)
        self.add_text(config)


def pix2struct(config: ConfigReader) -> Idle:
    """``Kosmos2_5VisionModel``: flat patches, rows and columns as positions, T5's layers."""
    size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    width = config.integer("num_attention_heads") * config.integer("head_dim")
    rows = config.integer("max_num_patches")

    def layer() -> Idle:
        return Idle(
            attention=Idle(
                query=Linear(size, width), key=Linear(size, width), value=Linear(size, width),
                output=Linear(width, size),
            ),
            mlp=Idle(wi_0=Linear(size, inner), wi_1=Linear(size, inner), wo=Linear(inner, size)),
            pre_mlp_layer_norm=RMSNorm(size), pre_attention_layer_norm=RMSNorm(size),
        )  # fmt: skip

    return Idle(
        "vision_tower",
        embeddings=Idle(
            patch_projection=linear(config.integer("patch_embed_hidden_size"), size),
            row_embedder=Embedding(rows, size), column_embedder=Embedding(rows, size),
        ),
        layers=listed("vision_tower", config.layers("num_hidden_layers"), layer),
        layernorm=RMSNorm(size),
    )  # fmt: skip


class Kosmos25Model(CountedModel):
    text = PartSpec(key="text_config")
    called, what = "text_model", "the tower"

    def __init__(self, config: ConfigReader) -> None:
        self.add_text(config)
        vision, size = (
            read_part(config, PartSpec(key="vision_config")).reader,
            self.text_width(config),
        )
        self.vision_model = pix2struct(vision)
        self.image_to_text_projection = Idle(
            "projector", dense=linear(vision.integer("hidden_size"), size),
            x_attn=Idle(
                q_proj=linear(size, size), k_proj=linear(size, size), v_proj=linear(size, size),
                out_proj=linear(size, size),
            ),
        )  # fmt: skip
        self.image_to_text_projection.latent_query = Weight(
            config.integer("latent_query_num"), size
        )

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        """As the text's own config says."""
        del config
        return tied
