"""OWLv2: CLIP, and for detection three small networks on every patch.

(transformers 5.23, models/owlv2/modeling_owlv2.py)
"""

from math import prod
from typing import ClassVar

from memplan.classes.compared.clip import OLD_EOS, CLIPTextModel, CLIPVisionModel, SiglipAttention
from memplan.classes.compared.two_towers import Contrast, TwoTowers
from memplan.classes.pictures.base import PictureTask, begin, begin_tower
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attend, unwidened_attention
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear, spare
from memplan.graph.modules.contractions import einsum, matmul
from memplan.graph.modules.functional import (
    detached,
    divide,
    filled_where_not,
    root_of_squares,
    summed,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.graph.modules.strides import Shape
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

DETECTION = "ForObjectDetection"
BOX = 4
"""Numbers of a box."""


class Owlv2Attention(SiglipAttention):
    eager: Attend | None = staticmethod(unwidened_attention)


class Owlv2TextModel(CLIPTextModel):
    """The largest token ends a text, whatever the config says."""

    attention_class = Owlv2Attention

    def add_own(self, config: ConfigReader) -> None:
        """That one."""
        del config
        self.eos = OLD_EOS


class Owlv2VisionModel(CLIPVisionModel):
    attention_class = Owlv2Attention
    first_norm = "pre_layernorm"


class PatchHead(Module):
    """``Owlv2BoxPredictionHead``."""

    def __init__(self, size: int, outputs: int) -> None:
        self.dense0, self.dense1 = Linear(size, size, bias=True), Linear(size, size, bias=True)
        self.gelu = ActivationModule(Activation.GELU)
        self.dense2 = Linear(size, outputs, bias=True)

    def forward(self, image_features: Handle) -> Handle:
        output = self.dense0(image_features)
        output = self.gelu(output)
        output = self.dense1(output)
        output = self.gelu(output)
        output = self.dense2(output)
        return output


class ClassHead(Module):
    """Products of patches and texts, shifted and scaled for each patch, in fp32."""

    def __init__(self, size: int, outputs: int) -> None:
        self.dense0 = Linear(size, outputs, bias=True)
        self.logit_shift, self.logit_scale = Linear(size, 1, bias=True), Linear(size, 1, bias=True)

    def forward(
        self, image_embeds: Handle, query_embeds: Handle, query_mask: Handle
    ) -> tuple[Handle, Handle]:
        image_class_embeds = self.dense0(image_embeds)
        image_class_embeds = divide(
            image_class_embeds, root_of_squares(image_class_embeds, linalg=True) + 1e-6
        )
        query_embeds = divide(query_embeds, root_of_squares(query_embeds, linalg=True) + 1e-6)
        pred_logits = einsum("bpd,bqd->bpq", image_class_embeds, query_embeds)
        logit_shift = self.logit_shift(image_embeds)
        logit_scale = self.logit_scale(image_embeds)
        logit_scale = logit_scale.unary(OperationKind.EXPM1) + 1.0
        pred_logits = (pred_logits + logit_shift) * logit_scale
        pred_logits = filled_where_not(pred_logits, query_mask)
        pred_logits = pred_logits.float()
        return pred_logits, image_class_embeds


class Owlv2ForObjectDetection(PictureTask):
    """It has no loss of its own."""

    begins_head = False
    meant = "one text a picture as its query, the sum of what is predicted as the loss: the class has none"

    def add_head(self, config: ConfigReader) -> None:
        """Three networks, and the norm of what they read."""
        del config
        assert isinstance(self.model, Owlv2Model)
        tower = self.model.vision_model
        assert isinstance(tower, CLIPVisionModel)
        tower.pools, size = False, tower.width
        self.class_head = ClassHead(size, self.model.text_width)
        self.box_head, self.objectness_head = PatchHead(size, BOX), PatchHead(size, 1)
        self.layer_norm = LayerNorm(size)

    def image_embeds(self, last_hidden_state: Handle) -> Handle:
        """Each patch times its picture's first token, normed."""
        assert isinstance(self.model, Owlv2Model)
        tower = self.model.vision_model
        begin(tower, "vision_model.norm", ModelPart.NORM, last_hidden_state)
        image_embeds = tower.children["post_layernorm"](last_hidden_state)
        self.begin_head(image_embeds)
        class_token_out = image_embeds.narrow(1, 1)
        image_embeds = image_embeds.narrow(image_embeds.shape[1] - 1, 1) * class_token_out
        image_embeds = self.layer_norm(image_embeds)
        return image_embeds

    def box_bias(self, shape: Shape) -> Handle:
        """A buffer."""
        run = self.run
        dtype = run.compute if run.autocast is None else DType.FP32
        return Handle(run, run.buffer(prod(shape), dtype), shape)

    def loss_of(self, query_embeds: Handle, *outputs: Handle) -> Tensor:
        """The sum of logits, chances and boxes of every patch."""
        run, image_feats = self.run, self.image_embeds(outputs[0])
        batch, width = query_embeds.shape
        query_embeds = query_embeds.view(batch, 1, width)
        query_mask = made_by(run, OperationKind.EQ, (batch, 1), DType.BOOL)
        pred_logits, class_embeds = self.class_head(image_feats, query_embeds, query_mask)
        objectness_logits = self.objectness_head(detached(image_feats))
        pred_boxes = self.box_head(image_feats)
        pred_boxes += self.box_bias(pred_boxes.shape[1:])
        pred_boxes = pred_boxes.unary(OperationKind.SIGMOID)
        sums = []
        for each in (pred_logits, pred_boxes, objectness_logits):
            run.returned.append(each.record)
            run.give_out(each.record)
            sums.append(summed(each))
        del class_embeds
        return (sums[0] + sums[1] + sums[2]).record


class Owlv2Model(TwoTowers):
    prefix = "owlv2"
    family = "owlv2"
    text_class = Owlv2TextModel
    vision_class = Owlv2VisionModel
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "Model": Contrast, DETECTION: Owlv2ForObjectDetection,
    }  # fmt: skip

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        vision_outputs = self.vision_model(pixel_values)
        self.run.finish(vision_outputs[-1].record)
        begin_tower(self, "text_model")
        text_outputs = self.text_outputs()
        text_embeds = self.text_projection(text_outputs[-1])
        if len(vision_outputs) == 1:
            self.parameter(self.logit_scale).unused = True
            spare(self.visual_projection)
            text_embeds = divide(text_embeds, root_of_squares(text_embeds, linalg=True))
            return text_embeds, *vision_outputs, *text_outputs
        image_embeds = self.visual_projection(vision_outputs[-1])
        image_embeds = divide(image_embeds, root_of_squares(image_embeds, linalg=True))
        text_embeds_norm = divide(text_embeds, root_of_squares(text_embeds, linalg=True))
        logit_scale = self.operand(self.logit_scale).unary(OperationKind.EXP)
        logits_per_text = matmul(text_embeds_norm, image_embeds.transpose(0, 1)) * logit_scale
        return logits_per_text, image_embeds, text_embeds_norm, *vision_outputs, *text_outputs

    def begin_head(self, given: Handle) -> None:
        """What is projected of texts stands before the head of a detector."""
        pools = getattr(self.vision_model, "pools", True)
        name, part = ("head", ModelPart.HEAD) if pools else ("projections", ModelPart.OTHER)
        begin(self, name, part, given)
