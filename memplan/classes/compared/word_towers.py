"""Models that compare pictures with texts which an encoder of BERT's kind reads.

(transformers 5.23, modeling_*.py of models/chinese_clip, models/altclip, models/align and models/vision_text_dual_encoder)
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

from memplan.classes.compared.clip import CLIPTextModel, CLIPVisionModel, SiglipVisionModel
from memplan.classes.compared.two_towers import (
    ONE_CLASS,
    Contrast,
    NormsDivide,
    ProjectedLast,
    TwoTowers,
)
from memplan.classes.encoders.base import Encoded
from memplan.classes.encoders.bert import BertModel, RobertaModel
from memplan.classes.encoders.layers import Attention, Layer, SelfAttention, Stack
from memplan.classes.encoders.tables import Embeddings
from memplan.classes.pictures.base import PictureModel, PictureTask, as_tower, begin
from memplan.classes.pictures.efficientnet import EfficientNetEncoder, EfficientNetModel
from memplan.classes.pictures.vit import (
    DeiTModel,
    Dinov2Model,
    Dinov2WithRegistersModel,
    IJepaModel,
    ViTModel,
)
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec, read_part, unknown_part
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import LayerNorm, Linear
from memplan.graph.modules.functional import divide, masked_fill_in_place, total
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class WidenedAttention(SelfAttention):
    """Its softmax names fp32."""

    eager = None


class WidenedParts(Attention):
    self_class = WidenedAttention


class WidenedLayer(Layer):
    attention_class = WidenedParts


class WidenedStack(Stack):
    layer_class = WidenedLayer


class BufferedEmbeddings(Embeddings):
    """Types are a buffer's, and positions are added in place."""

    adds_in_place = True

    def token_type_ids(self, batch: int, length: int) -> Handle | None:  # noqa: ARG002
        """Of one text for all."""
        return None


class BertTextModel(BertModel):
    embeddings_class = BufferedEmbeddings
    encoder_class = WidenedStack


class AltRobertaModel(RobertaModel):
    encoder_class = WidenedStack


class AltCLIPTextModel(Module):
    """A norm and a linear layer to the width that is projected."""

    def __init__(self, config: ConfigReader) -> None:
        size, self.width = config.integer("hidden_size"), config.integer("project_dim")
        self.roberta = AltRobertaModel(config, pooled=False)
        self.transformation = Linear(size, self.width, bias=True)
        self.pre_LN = LayerNorm(size)
        self.pre_LN.segment = "norm", ModelPart.NORM

    def forward(self, batch: int, length: int) -> Encoded:
        outputs = self.roberta(batch, length)
        sequence_output = outputs[0]
        sequence_output = self.pre_LN(sequence_output)
        projection_state = self.transformation(sequence_output)
        return Encoded(projection_state)


class WordTowers(TwoTowers):
    """An encoder of BERT's kind reads the texts."""

    text_model: Any

    def add_texts(self, text: ConfigReader) -> None:
        """That encoder."""
        self.read_texts(text, BertTextModel(text, pooled=False))

    def read_texts(self, text: ConfigReader, model: Module) -> None:
        """Take an encoder, and what others ask of it."""
        as_tower(model, "text_model")
        self.text_model, self.text_width = model, text.integer("hidden_size")
        self.vocab = text.integer("vocab_size")
        self.context = text.integer("max_position_embeddings")

    def text_outputs(self) -> tuple[Handle, ...]:
        """The states, and a vector of each text: numbers of positions and types are buffers of the longest one."""
        run, options = self.run, self.run.options
        shape = options.batch_size, min(options.seq_len, self.context)
        from_batch(run, prod(shape), DType.INT64)
        for _ in range(2):
            run.hold_buffer(self.context, DType.INT64)
        return self.read(self.text_model(*shape))

    def read(self, outputs: Encoded) -> tuple[Handle, ...]:
        """The first token's vector."""
        self.begin_head(outputs.last_hidden_state)
        return outputs.last_hidden_state, outputs.last_hidden_state.select(1)


class ChineseCLIPModel(WordTowers):
    family = "chinese_clip"


class AltCLIPModel(ProjectedLast, WordTowers):
    family = "altclip"

    def add_texts(self, text: ConfigReader) -> None:
        """A RoBERTa, and what projects its states."""
        self.read_texts(text, AltCLIPTextModel(text))
        self.text_width = text.integer("project_dim")


class AlignVisionModel(EfficientNetModel):
    """Without a last convolution."""

    prefix = tower = "vision_model"

    def add_encoder(self, config: ConfigReader) -> None:
        """The blocks alone."""
        self.encoder = EfficientNetEncoder(config, "vision_model.blocks", None)
        self.width = self.encoder.width


class SmoothedContrast(Contrast):
    """``align_loss``: a tenth of the loss is of all classes alike.

    (torch 2.13, aten/src/ATen/native/LossNLL.cpp, ``cross_entropy_loss_label_smoothing``)
    """

    def cross_entropy(self, logits: Handle) -> Handle:
        """With smoothed labels: which are left out, and how many are not, is kept."""
        run, nll_loss = self.run, super().cross_entropy(logits)
        made = run.segment.operations
        softmax = next(each for each in reversed(made) if each.kind is OperationKind.LOG_SOFTMAX)
        smooth_loss = -total(Handle(run, softmax.outputs[0], logits.shape))
        ignore_mask = made_by(run, OperationKind.EQ, smooth_loss.shape, DType.BOOL)
        smooth_loss = masked_fill_in_place(smooth_loss, ignore_mask)
        count = made_by(run, OperationKind.SUM, (), DType.INT64)
        whole = total(smooth_loss.view(1, -1)).view()
        ret = whole.like(run.tensor(1, whole.dtype))
        run.record(
            OperationKind.DIV, (whole.record, count.record), (ret.record,), saves=(count.record,),
            gradients=(Gradient.FRESH, Gradient.NONE),
        )  # fmt: skip
        return nll_loss * 0.5 + ret * 0.5


class AlignModel(NormsDivide, WordTowers):
    """Texts alone are projected; the text's pooler runs, and its result serves nothing."""

    family = "align"
    bare = SmoothedContrast
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": SmoothedContrast}
    eager_only = True
    vision_class = AlignVisionModel

    def add_texts(self, text: ConfigReader) -> None:
        """A BERT with its pooler."""
        self.read_texts(text, BertTextModel(text))
        self.text_model.pooler.is_read, self.text_model.pooler.segment = False, None

    def read(self, outputs: Encoded) -> tuple[Handle, ...]:
        """The first token's vector, beside what no loss reads."""
        begin(self, "text_model.pooler", ModelPart.OTHER, outputs.last_hidden_state)
        with UnreadGraph(self.run):
            pooled_output = self.text_model.pooler(outputs.last_hidden_state)
        *states, text_embeds = super().read(outputs)
        return *states, pooled_output, text_embeds

    def add_own(self, config: ConfigReader) -> None:
        """A projection with a bias, and a temperature that divides."""
        self.text_projection = Linear(self.text_width, config.integer("projection_dim"), bias=True)
        self.temperature = Weight()

    def projected(self, image_embeds: Handle, text_embeds: Handle) -> tuple[Handle, Handle]:
        """The second one."""
        return image_embeds, self.text_projection(text_embeds)

    def scaled(self, logits: Handle) -> Handle:
        """By the temperature."""
        return divide(logits, self.operand(self.temperature))


class DualEncoderModel(NormsDivide, WordTowers):
    """Any two towers, each of a type of its own."""

    endings = ONE_CLASS
    recomputes = False

    def __init__(self, config: ConfigReader) -> None:
        text = read_part(config, PartSpec(key="text_config", model_type="bert"))
        vision = read_part(config, PartSpec(key="vision_config", model_type="clip_vision_model"))
        for part, known in ((text, TEXTS), (vision, PICTURES)):
            if part.model_type not in known:
                raise unknown_part(part, known)
        made = TEXTS[text.model_type](text.reader)
        if isinstance(made, CLIPTextModel):
            self.text_model, self.text_width = made, made.width
            self.vocab, self.context = made.vocab, made.context
        else:
            self.read_texts(text.reader, made)
        self.add_pictures(PICTURES[vision.model_type](vision.reader))
        self.width = text.reader.integer("hidden_size")
        self.add_own(config)

    def add_pictures(self, model: PictureModel) -> None:
        """A tower that may be a model by itself."""
        if not model.tower:
            as_tower(model, "vision_model")
        self.vision_model, self.picture = model, model.picture

    def get_image_features(self, pixel_values: Handle) -> tuple[Handle, ...]:
        """The states, and what its tower pools or the first token's vector."""
        outputs = self.vision_model(pixel_values)
        return outputs if len(outputs) > 1 else (*outputs, outputs[0].select(1))

    def get_text_features(self) -> tuple[Handle, ...]:
        """The states and the pooled ones."""
        if not isinstance(self.text_model, CLIPTextModel):
            return self.text_outputs()
        outputs = self.text_model(self.text_model.inputs())
        self.begin_head(outputs[-1])
        return outputs

    def read(self, outputs: Encoded) -> tuple[Handle, ...]:
        """The pooler's vector."""
        last_hidden_state, pooler_output = outputs
        assert pooler_output is not None
        self.begin_head(pooler_output)
        return last_hidden_state, pooler_output


TEXTS: Mapping[str, Callable[[ConfigReader], Any]] = {
    "bert": BertModel,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), RobertaModel),
    "clip_text_model": CLIPTextModel,
}
PICTURES: Mapping[str, Callable[[ConfigReader], PictureModel]] = {
    "clip": CLIPVisionModel, "clip_vision_model": CLIPVisionModel,
    "siglip_vision_model": SiglipVisionModel, "vit": ViTModel, "deit": DeiTModel,
    "ijepa": IJepaModel, "dinov2": Dinov2Model, "dinov2_with_registers": Dinov2WithRegistersModel,
}  # fmt: skip
