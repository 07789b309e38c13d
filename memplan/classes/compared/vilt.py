"""ViLT: one transformer over a text's tokens and a picture's patches.

(transformers 5.23, models/vilt/modeling_vilt.py)
"""

from typing import ClassVar

from memplan.classes.compared.word_towers import BufferedEmbeddings
from memplan.classes.encoders.bert import BertPredictionHeadTransform
from memplan.classes.encoders.layers import PlainScores
from memplan.classes.encoders.tasks import OutputMatrix
from memplan.classes.pictures.base import PictureTask
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.classes.pictures.videomae import VideoMAELayer
from memplan.classes.pictures.vit import ViTEmbeddings, ViTModel
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import binary_cross_entropy, expanded, index, total
from memplan.graph.modules.grids import interpolate
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation

TWO_IMAGES = "ForImagesAndTextClassification"


class ViltEmbeddings(ViTEmbeddings):
    """Words and patches, to each of which a row of its kind is added."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        kinds = config.integer("modality_type_vocab_size")
        self.token_type_embeddings = Embedding(kinds, self.size)
        self.longest = config.integer("max_position_embeddings")

    def add_own(self, config: ConfigReader) -> None:
        """The tables of texts."""
        self.text_embeddings = BufferedEmbeddings(config)

    @property
    def text_shape(self) -> tuple[int, int]:
        """Of the batch's texts."""
        options = self.run.options
        return options.batch_size, min(options.seq_len, self.longest)

    def resized(self, sides: list[int]) -> Handle:
        """The patches' rows of the table, resized to a picture and padded by nothing: a copy."""
        rows = self.operand(self.position_embeddings)
        rows = rows.narrow(rows.shape[1] - 1, 1)
        side = round(rows.shape[1] ** 0.5)
        spatial_pos = rows.transpose(1, 2).view(1, self.size, side, side)
        return interpolate(spatial_pos, *sides).clone()

    def visual_embed(self, pixel_values: Handle) -> Handle:
        """As many patches as fit, in random order."""
        batch, _, height, width = pixel_values.shape
        from_batch(self.run, batch * height * width, DType.INT64)
        x = self.patch_embeddings.projection(pixel_values)
        sides = list(x.shape[2:])
        pos_embed = as_tokens(concatenate(*[self.resized(sides) for _ in range(batch)], dim=0))
        x = as_tokens(x)
        shape = x.shape
        select = made_by(self.run, OperationKind.INDICES, (2 * shape[0] * shape[1],), DType.INT64)
        x = index(x, select, shape)
        pos_embed = index(pos_embed, select, shape)
        cls_tokens = self.spread("cls_token", batch, 1)
        x = concatenate(cls_tokens, x, dim=1)
        first = self.operand(self.position_embeddings).narrow(1, 1)
        pos_embed = concatenate(expanded(first, (batch, 1, self.size)), pos_embed, dim=1)
        x = x + pos_embed
        x = self.dropout(x)
        return x

    def kinds(self, embeds: Handle) -> Handle:
        """A row of the table of kinds for each token."""
        shape = embeds.shape[:2]
        ids = made_by(self.run, OperationKind.ZEROS, shape, DType.INT64)
        found: Handle = self.token_type_embeddings(shape, ids)
        return found

    def forward(self, pixel_values: Handle) -> Handle:
        batch, length = self.text_shape
        for _ in ("input_ids", "attention_mask"):
            from_batch(self.run, batch * length, DType.INT64)
        for _ in ("position_ids", "token_type_ids"):
            self.run.hold_buffer(self.longest, DType.INT64)
        text_embeds = self.text_embeddings(batch, length)
        image_embeds = self.visual_embed(pixel_values)
        text_embeds = text_embeds + self.kinds(text_embeds)
        image_embeds = image_embeds + self.kinds(image_embeds)
        return concatenate(text_embeds, image_embeds, dim=1)


class ViltSelfAttention(PlainScores):
    def __init__(self, config: ConfigReader, size: int) -> None:
        del size
        self.bias = config.flag("qkv_bias")
        super().__init__(config)

    def forward(self, x: Handle, mask: Handle | None = None, *beside: Handle) -> Handle:  # type: ignore[override]
        return super().forward(x, mask, *beside)[0]


class ViltLayer(VideoMAELayer):
    attention_class = ViltSelfAttention


class Words(PictureTask):
    """What stands at the text's tokens alone, and their cross-entropy."""

    def words(self, sequence_output: Handle) -> Handle:
        """Those."""
        embeddings = self.model.children["embeddings"]
        assert isinstance(embeddings, ViltEmbeddings)
        return sequence_output.narrow(embeddings.text_shape[1], 1)

    def logits(self, text_features: Handle) -> Handle:
        """What is scored."""
        raise NotImplementedError

    def loss_of(self, sequence_output: Handle, *others: Handle) -> Tensor:
        """Of each token."""
        del others
        text_features = self.words(sequence_output)
        logits = self.logits(text_features)
        labels = from_batch(self.run, text_features.shape[0] * text_features.shape[1], DType.INT64)
        self.run.returned.append(logits.record)
        self.run.give_out(logits.record)
        return cross_entropy(self.run, logits.record, labels)


class ViltForTokenClassification(Words):
    drops = ("pooler",)

    def add_head(self, config: ConfigReader) -> None:
        """Classes of each token."""
        del config
        self.classifier = Linear(self.model.width, self.spec.num_labels, bias=True)

    def logits(self, text_features: Handle) -> Handle:
        """Of each token."""
        found: Handle = self.classifier(text_features)
        return found


class ViltMLMHead(Module):
    def __init__(self, config: ConfigReader, task: PictureTask) -> None:
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = OutputMatrix(task.spec, task.model.width)
        embeddings = task.model.children["embeddings"]
        assert isinstance(embeddings, ViltEmbeddings)
        self.decoder.weight = embeddings.text_embeddings.word_embeddings.weight

    def forward(self, x: Handle) -> Handle:
        x = self.transform(x)
        x = self.decoder(x)
        return x


class ViltForMaskedLM(Words):
    def add_head(self, config: ConfigReader) -> None:
        """The output matrix, tied whatever the file says (``ViltConfig.__post_init__``)."""
        self.mlm_score = ViltMLMHead(config, self)

    def logits(self, text_features: Handle) -> Handle:
        """Of the vocabulary."""
        found: Handle = self.mlm_score(text_features)
        return found


class ViltForImageAndTextRetrieval(PictureTask):
    pooled = True
    meant = "the sum of what the class returns as the loss: it has none"

    def add_head(self, config: ConfigReader) -> None:
        """One number of each pair."""
        del config
        self.rank_output = Linear(self.model.width, 1, bias=True)

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """All of them summed."""
        del last_hidden_state
        logits = self.rank_output(others[0])
        self.run.returned.append(logits.record)
        self.run.give_out(logits.record)
        return total(logits.view(1, -1)).record


def answers(inputs: int, inner: int, labels: int) -> InOrder:
    """Two linear layers, a norm and a nonlinearity between them."""
    return InOrder(
        _0=Linear(inputs, inner, bias=True), _1=LayerNorm(inner),
        _2=ActivationModule(Activation.GELU), _3=Linear(inner, labels, bias=True),
    )  # fmt: skip


class ViltForQuestionAnswering(PictureTask):
    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        """Answers as classes, of which several may be right."""
        del config
        size = self.model.width
        self.classifier = answers(size, 2 * size, self.spec.num_labels)

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """Binary cross-entropy of each answer, times their number."""
        del last_hidden_state
        logits = self.classifier(others[0])
        labels = Handle(
            self.run,
            from_batch(self.run, logits.shape[0] * logits.shape[1], DType.FP32),
            logits.shape,
        )
        self.run.returned.append(logits.record)
        self.run.give_out(logits.record)
        loss = Handle(self.run, binary_cross_entropy(logits, labels), ()) * 2.0
        return loss.record


class ViltForImagesAndTextClassification(PictureTask):
    """Its operations are not written down."""

    def add_head(self, config: ConfigReader) -> None:
        """Of what is read of each picture."""
        inputs = self.model.width * config.integer("num_images", default=1)
        self.classifier = answers(inputs, inputs, self.spec.num_labels)


class ViltModel(ViTModel):
    prefix = "vilt"
    eager_only = tied = True
    fixed = False
    layers_in = "encoder.layer"
    embeddings_class = ViltEmbeddings
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "ForMaskedLM": ViltForMaskedLM,
        "ForImageAndTextRetrieval": ViltForImageAndTextRetrieval,
        TWO_IMAGES: ViltForImagesAndTextClassification,
        "ForQuestionAnswering": ViltForQuestionAnswering,
        "ForTokenClassification": ViltForTokenClassification,
    }

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.vocab = config.integer("vocab_size")
        self.context = config.integer("max_position_embeddings")

    def layer(self, config: ConfigReader, kind: object) -> Module:
        """The same at any depth."""
        del kind
        return ViltLayer(config, self.width, config.integer("intermediate_size"))

    def left_out(self, ending: str) -> bool:
        """Two pictures with one text are not written down."""
        return ending == TWO_IMAGES
