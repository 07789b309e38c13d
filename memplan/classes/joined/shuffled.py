"""Language models whose neighbouring patches are joined before the projector.

(transformers 5.23, modeling_*.py of models/aya_vision, models/cohere2_vision, models/idefics3, models/smolvlm,
models/modernvbert, models/internvl and models/lfm2_vl)
"""

from collections.abc import Mapping
from math import isqrt
from typing import ClassVar

from memplan.classes.compared.clip import SiglipVisionModel, VisionEmbeddings
from memplan.classes.encoders.base import Encoder
from memplan.classes.encoders.modernbert import (
    ModernBertClassifier,
    ModernBertForMaskedLM,
    ModernBertForMultipleChoice,
    ModernBertForQuestionAnswering,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertPredictionHead,
    read_pooling,
)
from memplan.classes.encoders.tasks import EncodedStates, OutputMatrix, Tasks
from memplan.classes.joined.base import CollectedModel, JoinedModel, read_text
from memplan.classes.joined.llava import SIGLIP_384, FeaturesModel
from memplan.classes.joined.plain import ProjectedModel
from memplan.classes.pictures.base import PictureModel
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.families.nesting import EMPTY, PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import ratio
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import made_from, read_in_rows
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import written_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.networks import Activation
from memplan.training.choices_of_kernels.kernels import AttentionKernel


def pixel_shuffle(x: Handle, factor: int) -> Handle:
    """Squares of so many patches a side of (pictures, down, across, width): two views, each permuted and copied."""
    batch, *_, channels = x.shape
    down, across = (side // factor * factor for side in x.shape[1:3])
    if (down, across) != x.shape[1:3]:
        x = fitting(fitting(x, 1, down), 2, across)
    x = x.reshape(batch, down, across // factor, channels * factor)
    x = x.permute(0, 2, 1, 3)
    x = x.reshape(batch, across // factor, down // factor, channels * factor**2)
    return x.permute(0, 2, 1, 3)


def squared(tokens: Handle) -> Handle:
    """``tokens.reshape(batch, side, side, -1)``."""
    batch, length, width = tokens.shape
    side = isqrt(length)
    if side**2 != length:
        tokens = fitting(tokens, 1, side**2)
    return tokens.reshape(batch, side, side, width)


def fitting(x: Handle, dim: int, size: int) -> Handle:
    """As much of a dimension as can be laid in squares.

    Raises ``SetupError`` where that is not all of it, as the class does; not where its weights alone are asked for.
    """
    if x.shape[dim] != size and x.run.options.seq_len > 1:
        msg = f"image_size: {x.shape[dim]} patches cannot be joined as this model's class joins them, {size} can"
        raise SetupError(msg)
    return x.narrow(size, dim)


class HalvedPerceptron(InOrder):
    """A perceptron whose first layer gives two halves, of which one is the other's gate."""

    def __init__(self, factor: int, inputs: int, inner: int, outputs: int, *, normed: bool) -> None:
        self.factor = factor
        joined = inputs * factor**2
        if normed:
            self.layernorm = LayerNorm(joined)
        super().__init__(
            linear_1=Linear(joined, inner, bias=True), act=ActivationModule(Activation.SILU),
            linear_2=Linear(inner // 2, outputs, bias=True),
        )  # fmt: skip

    def forward(self, image_features: Handle) -> Handle:
        count = image_features.shape[0]
        image_features = pixel_shuffle(squared(image_features), self.factor)
        if "layernorm" in self.children:
            image_features = self.layernorm(image_features)
        hidden_states = self.children["linear_1"](image_features)
        half = hidden_states.shape[-1] // 2
        x, gate = hidden_states.split(half, half)
        hidden_states = self.children["act"](gate) * x
        hidden_states = self.children["linear_2"](hidden_states)
        return hidden_states.reshape(count, -1, hidden_states.shape[-1])


class AyaVisionModel(FeaturesModel):
    text = PartSpec(key="text_config", model_type="cohere2")
    tower_kind = "siglip_vision_model"
    fills: Mapping[str, object] = {**SIGLIP_384, "num_attention_heads": 14}

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> Module:
        inner = config.integer("alignment_intermediate_size", default=outputs)
        factor = config.integer("downsample_factor")
        return HalvedPerceptron(factor, inputs, inner, outputs, normed=True)


class Cohere2VisionModel(ProjectedModel):
    text = PartSpec(key="text_config", model_type="cohere2")
    fills: ClassVar[Mapping[str, object]] = {
        "hidden_size": 1152, "intermediate_size": 3072, "image_size": 512,
        "num_hidden_layers": 27, "num_attention_heads": 12,
    }  # fmt: skip

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config, "siglip_vision_model", self.fills)
        inner, factor = (
            config.integer(f"{key}") for key in ("alignment_intermediate_size", "downsample_factor")
        )
        self.multi_modal_projector = HalvedPerceptron(
            factor, tower.width, inner, self.text_width(config), normed=False
        )
        self.add_text(config)


class Idefics3VisionEmbeddings(VisionEmbeddings):
    """Each picture's patches have numbers of their own, found by the shares of its sides."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config, token=False, bias=True)

    def forward(self, pixel_values: Handle) -> Handle:
        patch_embeds = self.patch_embedding(pixel_values)
        embeddings = as_tokens(patch_embeds)
        shape = embeddings.shape[:2]
        position_ids = made_by(self.run, OperationKind.ZEROS, shape, DType.INT64)
        pos_ids = made_by(self.run, OperationKind.ADD, shape, DType.INT64)
        position_ids = pos_ids.apart(OperationKind.WHERE, position_ids)
        embeddings = embeddings + self.position_embedding(shape, position_ids)
        return read_in_rows(embeddings)


class Idefics3VisionTransformer(SiglipVisionModel):
    """SigLIP's without a head; pictures of any size, which it leaves as they come, and whose padding is told apart."""

    fixed = pools = casts = False

    def embedded(self, config: ConfigReader) -> Module:
        return Idefics3VisionEmbeddings(config)

    def mask(self, hidden_states: Handle) -> Handle | None:
        """``create_bidirectional_mask`` of ones: none where the kernel needs none."""
        if self.run.kernels.attention is not AttentionKernel.EAGER:
            return None
        shape = hidden_states.shape[:2]
        ones = made_by(self.run, OperationKind.ONES, shape, DType.BOOL)
        return written_mask(ones, hidden_states)


class ShuffledPictures(CollectedModel):
    """Pictures that hold something are cast and picked out; their joined patches go through one linear layer."""

    sees, called = "vision_model", "text_model"
    connector: Module

    def add_tower(
        self, config: ConfigReader, kind: str = "", fills: Mapping[str, object] = EMPTY
    ) -> PictureModel:
        tower = super().add_tower(config, kind, fills)
        self.picture = tower.picture = replace(tower.picture, casts=True)
        return tower

    def pictures(self) -> Handle:
        """Pictures that hold something, told from those that pad a sample."""
        pixel_values = super().pictures().to(self.run.compute)
        empty = pixel_values.apart(OperationKind.EQ, dtype=DType.BOOL)
        counts = made_from(OperationKind.SUM, pixel_values.shape[:1], DType.INT64, empty)
        del empty
        return made_from(
            OperationKind.INDEX, pixel_values.shape, pixel_values.dtype, pixel_values, counts
        )

    def get_image_features(self) -> Handle:
        pixel_values = self.pictures()
        image_hidden_states, _ = self.look(pixel_values)
        self.begin_projector(image_hidden_states)
        image_features: Handle = self.connector(image_hidden_states)
        return image_features


class Connector(Module):
    """Joined patches, and one linear layer without a bias."""

    def __init__(self, factor: int, inputs: int, outputs: int, *, within: str = "") -> None:
        self.factor = factor
        made: Module = Linear(inputs * factor**2, outputs)
        self.modality_projection = InOrder(**{within: made}) if within else made

    def forward(self, image_hidden_states: Handle) -> Handle:
        batch, _, width = image_hidden_states.shape
        x = pixel_shuffle(squared(image_hidden_states), self.factor)
        image_hidden_states = x.reshape(batch, -1, width * self.factor**2)
        del x
        image_hidden_states = self.modality_projection(image_hidden_states)
        return image_hidden_states


class Idefics3Model(ShuffledPictures):
    def __init__(self, config: ConfigReader) -> None:
        tower, factor = self.add_tower(config), config.integer("scale_factor")
        self.connector = Connector(factor, tower.width, self.text_width(config), within="proj")
        self.add_text(config)


class SmolVLMModel(Idefics3Model):
    """It returns what its tower gave, and not what was written over the embeddings."""

    returns_features = False

    def get_image_features(self) -> Handle:
        image_features = super().get_image_features()
        self.run.cache(image_features.record)
        return image_features


class ModernVBertForMaskedLM(ModernBertForMaskedLM):
    upcasts = False

    def add_head(self, config: ConfigReader) -> None:
        text = read_text(config, ModernVBertModel.text).reader
        self.projection_head = ModernBertPredictionHead(text)
        self.lm_head = OutputMatrix(
            self.spec, self.spec.hidden_size, bias=text.flag("decoder_bias")
        )
        self.lm_head.tie(self)

    def scores(self, x: Handle) -> Handle:
        return self.lm_head(self.projection_head(x))


class OuterClassifier(ModernBertClassifier):
    """Its dropout stands in the outer config."""

    def add_head(self, config: ConfigReader) -> None:
        self.head = ModernBertPredictionHead(read_text(config, ModernVBertModel.text).reader)
        self.drop = Dropout(config.number("classifier_dropout"))
        self.classifier = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)


class SequenceClassifier(OuterClassifier, ModernBertForSequenceClassification):
    pass


class MultipleChoice(OuterClassifier, ModernBertForMultipleChoice):
    pass


class TokenClassifier(OuterClassifier, ModernBertForTokenClassification):
    pass


class QuestionAnswering(OuterClassifier, ModernBertForQuestionAnswering):
    pass


class ModernVBertModel(ShuffledPictures, Encoder):
    text = PartSpec(key="text_config", model_type="modernbert")
    plain_logits = True
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: ModernVBertForMaskedLM, Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: SequenceClassifier,
        Task.TOKEN_CLASSIFICATION: TokenClassifier, Task.QUESTION_ANSWERING: QuestionAnswering,
        Task.MULTIPLE_CHOICE: MultipleChoice,
    }  # fmt: skip

    @property
    def token_table(self) -> Embedding:
        found = self.words.token_table
        assert isinstance(found, Embedding)
        return found

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        self.classifier_pooling = read_pooling(config, ("cls", "mean"))
        tower = self.add_tower(config, "siglip_vision_model")
        factor = config.integer("pixel_shuffle_factor")
        self.connector = Connector(factor, tower.width, self.text_width(config))
        self.add_text(config)


class JoinedPerceptron(InOrder):
    """A norm over joined patches, and a perceptron."""

    def __init__(
        self, joined: int, inner: int, outputs: int, active: Activation, *, bias: bool, normed: bool
    ) -> None:
        if normed:
            self.layer_norm = LayerNorm(joined)
        super().__init__(
            linear_1=Linear(joined, inner, bias=bias), act=ActivationModule(active),
            linear_2=Linear(inner, outputs, bias=bias),
        )  # fmt: skip


class InternVLModel(FeaturesModel):
    text = PartSpec(key="text_config", model_type="qwen2")
    tower_kind, fills = "", EMPTY
    reads_last = True

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> Module:
        self.factor = shuffled_side(config)
        active = tower_activation(config, "projector_hidden_act")
        joined = inputs * self.factor**2
        return JoinedPerceptron(joined, outputs, outputs, active, bias=True, normed=True)

    def pictures(self) -> Handle:
        return super().pictures().to(self.run.compute)

    def get_image_features(self) -> Handle:
        pixel_values = self.pictures()
        vision_features = self.selected(pixel_values)
        vision_features = pixel_shuffle(squared(vision_features), self.factor).contiguous()
        vision_features = vision_features.reshape(
            vision_features.shape[0], -1, vision_features.shape[-1]
        )
        return self.multi_modal_projector(vision_features)


def shuffled_side(config: ConfigReader) -> int:
    """Patches along a side of those that are joined: InternVL gives the ratio by which they shrink.

    >>> shuffled_side(ConfigReader({"downsample_ratio": 0.5}, source="a file"))
    2
    """
    found = ratio(config, "downsample_ratio", default=0.5)
    side = int(1 / found) if found else 0
    if not side:
        error = config.fail("downsample_ratio", f"must be above 0 and at most 1, got {found}")
        raise error
    return side


class Lfm2VlModel(JoinedModel):
    """Each picture's patches are cut out of its padding and joined by themselves."""

    text = PartSpec(key="text_config", model_type="lfm2")

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config, "siglip2_vision_model")
        high, wide = self.picture.image
        # Its processor keeps pictures of up to four times as many patches as the table has.
        self.picture = tower.picture = replace(self.picture, image=(2 * high, 2 * wide))
        self.factor = config.integer("downsample_factor")
        self.multi_modal_projector = JoinedPerceptron(
            tower.width * self.factor**2, config.integer("projector_hidden_size"),
            self.text_width(config), tower_activation(config, "projector_hidden_act"),
            bias=config.flag("projector_bias"), normed=config.flag("projector_use_layernorm"),
        )  # fmt: skip
        self.add_text(config)

    def get_image_features(self) -> Handle:
        last_hidden_state, _ = self.look()
        self.begin_projector(last_hidden_state)
        image_features = []
        for feature in last_hidden_state.unbind(0):
            square = squared(feature.unsqueeze(0))
            img_embedding = self.multi_modal_projector(pixel_shuffle(square, self.factor))
            image_features.append(img_embedding.reshape(-1, img_embedding.shape[-1]))
            del feature, square, img_embedding
        del last_hidden_state
        self.named += image_features
        return concatenate(*image_features, dim=0)
