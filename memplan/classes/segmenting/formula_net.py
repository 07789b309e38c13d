"""PP-FormulaNet: Segment Anything's encoder, two more convolutions, and mBART's decoder.

(transformers 5.23, models/pp_formulanet/modeling_pp_formulanet.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import PictureModel, PictureTask, begin_tower
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.classes.segmenting.sam import SamVisionEncoder, parts_of
from memplan.classes.translating.bart import MBartDecoder
from memplan.dtypes import DType
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart, WeightRole


class PPFormulaNetMultiModalProjector(InOrder):
    segment = "projector", ModelPart.OTHER

    def __init__(self, config: ConfigReader) -> None:
        before, middle, after = (
            config.integer(f"post_conv_{key}_channels") for key in ("in", "mid", "out")
        )
        out = config.integer("decoder_hidden_size")
        super().__init__(
            conv1=Conv2d(before, middle, 3, stride=2, padding=1, bias=False),
            conv2=Conv2d(middle, after, 3, stride=2, padding=1, bias=False),
            linear_1=Linear(after, after, bias=True), linear_2=Linear(after, out, bias=True),
        )  # fmt: skip

    def forward(self, x: Handle) -> Handle:
        conv1, conv2, linear_1, linear_2 = self.children.values()
        x = conv1(x)
        x = conv2(x)
        x = as_tokens(x)
        x = linear_1(x)
        x = linear_2(x)
        return x


class PPFormulaNetVisionModel(SamVisionEncoder):
    tower = "encoder"
    written_out = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.multi_modal_projector = PPFormulaNetMultiModalProjector(config)

    def forward(self, pixel_values: Handle) -> tuple[Handle, Handle]:
        (hidden_states,) = super().forward(pixel_values)
        return hidden_states, self.multi_modal_projector(hidden_states)


class PPFormulaNetForConditionalGeneration(PictureTask):
    """Its matrix of logits is its own, whatever the flags say (``_tied_weights_keys``)."""

    def add_head(self, config: ConfigReader) -> None:
        """That matrix."""
        del config
        self.lm_head = Linear(self.model.width, self.spec.num_outputs, role=WeightRole.OUTPUT)

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """Of each token."""
        del last_hidden_state
        run = self.run
        logits = self.lm_head(others[-1])
        batch, length, _ = logits.shape
        labels = from_batch(run, batch * length, DType.INT64)
        loss = cross_entropy(run, logits.float().record, labels)
        hand_out(run, logits.record)
        return loss


class PPFormulaNetModel(PictureModel):
    prefix = "model"
    tower = "encoder"
    recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "ForConditionalGeneration": PPFormulaNetForConditionalGeneration
    }

    def __init__(self, config: ConfigReader) -> None:
        vision, text = parts_of(config, "vision", "text")
        self.decoder = MBartDecoder(text)
        self.encoder = PPFormulaNetVisionModel(vision)
        self.width, self.vocab = text.integer("d_model"), text.integer("vocab_size")
        self.context = text.integer("max_position_embeddings")
        height, width = self.encoder.picture.image
        channels = self.encoder.picture.channels
        self.picture = self.described(height, width, channels=channels, fixed=True)

    def forward(self, pixel_values: Handle) -> tuple[Handle, Handle]:
        options = self.run.options
        shape = options.batch_size, min(options.seq_len, self.context)
        ids = Handle(self.run, from_batch(self.run, shape[0] * shape[1], DType.INT64), shape)
        hidden_states, pooler_output = self.encoder(pixel_values)
        self.run.finish(pooler_output.record)
        begin_tower(self, "decoder")
        return hidden_states, self.decoder(*shape, ids, pooler_output)
