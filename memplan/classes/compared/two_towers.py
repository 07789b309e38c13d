"""Models that compare pictures with texts: a tower for each, two projections to one width, and their loss.

(transformers 5.23, modeling_*.py of models/clip, models/siglip and models/owlv2)
"""

from collections.abc import Callable
from typing import Any, ClassVar

from memplan.classes.compared.clip import (
    CLIPTextModel,
    CLIPVisionModel,
    Siglip2VisionModel,
    SiglipTextModel,
    SiglipVisionModel,
    TextTower,
)
from memplan.classes.pictures.base import (
    IMAGES,
    ImageClassification,
    PictureModel,
    PictureStates,
    PictureTask,
    begin,
    begin_tower,
)
from memplan.dtypes import DType
from memplan.families.nesting import towers
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import Linear, fp32_under_autocast
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import (
    divide,
    log_sigmoid,
    mean_of_tokens,
    root_of_squares,
    total,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operations.losses import cross_entropy
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


def vector_norm(x: Handle) -> Handle:
    """``_get_vector_norm``, whose powers and sums autocast has made in fp32."""
    square_tensor = fp32_under_autocast(x).pow(2)
    sum_tensor = total(square_tensor)
    normed_tensor = sum_tensor.pow(0.5)
    return normed_tensor


class Contrast(PictureStates):
    """Every picture's product with every text's, and the loss."""

    begins_head = False

    def loss_of(self, logits_per_text: Handle, *others: Handle) -> Tensor:
        """``image_text_contrastive_loss``."""
        run = self.run
        self.returned(logits_per_text, *others[:2])
        caption_loss = self.cross_entropy(logits_per_text)
        turned = Handle(run, run.alias(logits_per_text.record), logits_per_text.shape)
        image_loss = self.cross_entropy(turned)
        return ((caption_loss + image_loss) / 2.0).record

    def returned(self, logits: Handle, *vectors: Handle) -> None:
        """Note what the class returns beside its loss."""
        self.run.returned += [each.record for each in (*reversed(vectors), logits)]
        self.run.give_out(logits.record)

    def cross_entropy(self, logits: Handle) -> Handle:
        """Of rows whose own column is theirs."""
        run, shape = self.run, (logits.shape[0],)
        labels = made_by(run, OperationKind.ARANGE, shape, DType.INT64)
        return Handle(run, cross_entropy(run, logits.record, labels.record), ())


class PatchesMean(ImageClassification):
    """The picture's tower alone, and the mean of its patches."""

    begins_head = False
    drops: ClassVar[tuple[str, ...]] = (
        "text_model", "visual_projection", "text_projection", "logit_scale",
    )  # fmt: skip

    @property
    def num_inputs(self) -> int:
        """Numbers of the vector that it reads."""
        assert isinstance(self.model, TwoTowers)
        return self.model.vision_model.width

    without = 1
    """Tokens before the patches."""

    def add_head(self, config: ConfigReader) -> None:
        """The classifier; what the tower makes of its patches leads nowhere."""
        super().add_head(config)
        assert isinstance(self.model, TwoTowers)
        self.model.vision_model.reads_pooled = False

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """That mean."""
        del others
        self.begin_head(last_hidden_state)
        patches = last_hidden_state.narrow(last_hidden_state.shape[1] - self.without, 1)
        return mean_of_tokens(patches)


class TwoTowers(PictureModel):
    """A tower for pictures and one for texts."""

    prefix = ""
    tower = "vision_model"
    recomputes = True
    visual_projection: Module
    text_projection: Module
    family: str
    bare: ClassVar[type[PictureTask]] = Contrast
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "Model": Contrast, IMAGES: PatchesMean,
    }  # fmt: skip
    text_class: Callable[[ConfigReader], TextTower] = CLIPTextModel
    vision_class: Callable[[ConfigReader], PictureModel] = CLIPVisionModel
    text_model: Any
    vision_model: PictureModel

    def __init__(self, config: ConfigReader) -> None:
        text, vision = towers(config, self.family)
        self.add_texts(text)
        self.vision_model = self.vision_class(vision)
        self.width, self.picture = text.integer("hidden_size"), self.vision_model.picture
        self.add_own(config)

    def add_texts(self, text: ConfigReader) -> None:
        """The tower of texts, and what others ask of it."""
        self.text_model = self.text_class(text)
        self.text_width, self.vocab = self.text_model.width, self.text_model.vocab
        self.context = self.text_model.context

    def add_own(self, config: ConfigReader) -> None:
        """Projections without biases, and a temperature."""
        width = config.integer("projection_dim")
        self.visual_projection = Linear(self.vision_model.width, width)
        self.visual_projection.segment = "projected", ModelPart.OTHER
        self.text_projection = Linear(self.text_width, width)
        self.logit_scale = Weight()

    def text_outputs(self) -> tuple[Handle, ...]:
        """What the texts' tower gives."""
        outputs: tuple[Handle, ...] = self.text_model(self.text_model.inputs())
        self.begin_head(outputs[-1])
        return outputs

    def begin_head(self, given: Handle) -> None:
        """Both towers are through."""
        begin(self, "head", ModelPart.HEAD, given)

    def pixels_shape(self) -> tuple[int, ...]:
        """As its tower reads them."""
        return self.vision_model.pixels_shape()

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        if "text_model" not in self.children:
            return self.vision_model(pixel_values)
        vision_outputs = self.get_image_features(pixel_values)
        self.run.finish(vision_outputs[-1].record)
        begin_tower(self, "text_model")
        text_outputs = self.get_text_features()
        image_embeds, text_embeds = self.projected(vision_outputs[-1], text_outputs[-1])
        image_embeds = self.divided(image_embeds)
        text_embeds = self.divided(text_embeds)
        logits_per_text = matmul(text_embeds, image_embeds.transpose(0, 1))
        logits_per_text = self.scaled(logits_per_text)
        return logits_per_text, image_embeds, text_embeds, *vision_outputs, *text_outputs

    def get_image_features(self, pixel_values: Handle) -> tuple[Handle, ...]:
        """What the pictures' tower gives, its vector projected."""
        *states, pooled_output = self.vision_model(pixel_values)
        return *states, self.visual_projection(pooled_output)

    def get_text_features(self) -> tuple[Handle, ...]:
        """The same of texts."""
        *states, pooled_output = self.text_outputs()
        return *states, self.text_projection(pooled_output)

    def projected(self, image_embeds: Handle, text_embeds: Handle) -> tuple[Handle, Handle]:
        """Both vectors, where they are not projected yet."""
        return image_embeds, text_embeds

    def scaled(self, logits: Handle) -> Handle:
        """By the temperature."""
        return logits * self.operand(self.logit_scale).unary(OperationKind.EXP)

    def divided(self, embeds: Handle) -> Handle:
        """Over its length."""
        return divide(embeds, vector_norm(embeds))


ONE_CLASS: dict[str, type[PictureTask]] = {"Model": Contrast}
"""Of types whose one class compares."""


class CLIPModel(TwoTowers):
    family = "clip"


class ProjectedLast(TwoTowers):
    """What both towers give is projected once both are through."""

    def get_image_features(self, pixel_values: Handle) -> tuple[Handle, ...]:
        """As its tower gives them."""
        return self.vision_model(pixel_values)

    def get_text_features(self) -> tuple[Handle, ...]:
        """The same of texts."""
        return self.text_outputs()

    def projected(self, image_embeds: Handle, text_embeds: Handle) -> tuple[Handle, Handle]:
        """Both."""
        image_embeds = self.visual_projection(image_embeds)
        text_embeds = self.text_projection(text_embeds)
        return image_embeds, text_embeds


class NormsDivide(ProjectedLast):
    """Each vector's length is a norm."""

    def divided(self, embeds: Handle) -> Handle:
        """Over that."""
        return divide(embeds, root_of_squares(embeds))


class SigmoidContrast(Contrast):
    def loss_of(self, logits_per_text: Handle, *others: Handle) -> Tensor:
        """A log-sigmoid of the logits times plus or minus one."""
        run, size = self.run, logits_per_text.shape
        self.returned(logits_per_text, *others[:2])
        eye = made_by(run, OperationKind.EYE, size, DType.FP32)
        ones = made_by(run, OperationKind.NEG, size, logits_per_text.dtype)
        m1_diag1 = ones.apart(OperationKind.ADD, eye * 2.0, dtype=DType.FP32)
        loglik = log_sigmoid(m1_diag1 * logits_per_text)
        nll = -total(loglik)
        loss = nll.view(1, -1).mean()
        return loss.record


class AllPatchesMean(PatchesMean):
    drops = "text_model", "logit_scale", "logit_bias"
    without = 0


class SiglipModel(NormsDivide):
    """No projections, but a temperature and a bias."""

    family = "siglip"
    text_class = SiglipTextModel
    vision_class = SiglipVisionModel
    bare = SigmoidContrast
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "Model": SigmoidContrast, IMAGES: AllPatchesMean,
    }  # fmt: skip

    def add_own(self, config: ConfigReader) -> None:
        """Both are numbers."""
        del config
        self.logit_scale, self.logit_bias = Weight(1), Weight(1)

    def left_out(self, ending: str) -> bool:
        """A tower of pictures that pools nothing has no vector to compare."""
        return ending != IMAGES and "head" not in self.vision_model.children

    def projected(self, image_embeds: Handle, text_embeds: Handle) -> tuple[Handle, Handle]:
        """As they are."""
        return image_embeds, text_embeds

    def scaled(self, logits: Handle) -> Handle:
        """By the temperature, and shifted."""
        return super().scaled(logits) + self.operand(self.logit_bias)


class Siglip2Model(SiglipModel):
    family = "siglip2"
    vision_class = Siglip2VisionModel
