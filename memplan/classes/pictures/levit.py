"""LeViT: every linear layer has a batch norm for its bias, and scores get trained offsets.

(transformers 5.23, models/levit/modeling_levit.py)
"""

from itertools import pairwise
from typing import ClassVar

from memplan.classes.pictures.base import IMAGES, ImageClassification, PictureModel, PictureTask
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.dtypes import DType
from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import matmul
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.functional import mean_of_tokens, softmax
from memplan.graph.modules.grids import BatchNorm, Conv2d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart


def conv_embeddings(config: ConfigReader, before: int, after: int) -> InOrder:
    """``LevitConvEmbeddings``."""
    convolution = Conv2d(
        before, after, config.integer("kernel_size"), bias=False,
        stride=config.integer("stride", default=2),
        padding=config.integer("padding", default=1, minimum=0),
    )  # fmt: skip
    return InOrder(convolution=convolution, batch_norm=BatchNorm(after))


class LevitPatchEmbeddings(InOrder):
    """Four convolutions, each with twice the channels of the one before."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        channels = [config.integer("num_channels"), *(size // 2**step for step in (3, 2, 1, 0))]
        for number, (before, after) in enumerate(pairwise(channels), 1):
            setattr(self, f"embedding_layer_{number}", conv_embeddings(config, before, after))
            if number < len(channels) - 1:
                setattr(self, f"activation_layer_{number}", ActivationModule(Activation.HARDSWISH))

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings = super().forward(pixel_values)
        return as_tokens(embeddings)


class MLPLayerWithBN(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        self.linear = Linear(inputs, outputs)
        self.batch_norm = BatchNorm(outputs)

    def forward(self, hidden_state: Handle) -> Handle:
        hidden_state = self.linear(hidden_state)
        shape = hidden_state.shape
        hidden_state = self.batch_norm(hidden_state.view(-1, shape[-1])).view(*shape)
        return hidden_state


class OffsetAttention(Module):
    """What ``LevitAttention`` and ``LevitAttentionSubsample`` share."""

    block = LayerBlock.ATTENTION
    projection: MLPLayerWithBN

    def __init__(self, heads: int, key_dim: int, ratio: int, distances: int) -> None:
        self.num_attention_heads, self.key_dim, self.value_dim = heads, key_dim, ratio * key_dim
        self.activation = ActivationModule(Activation.HARDSWISH)
        self.attention_biases = Weight(heads, distances)

    def get_attention_biases(self, queries: int, keys: int) -> Handle:
        """A number for each pair of positions and each head, of those for each distance."""
        run, table = self.run, self.parameter(self.attention_biases)
        attention_bias_idxs = run.buffer(queries * keys, DType.INT64)
        made = empty(run, (self.num_attention_heads, queries, keys), table.dtype)
        run.record(
            OperationKind.INDEX, (table, attention_bias_idxs), (made.record,),
            saves=(attention_bias_idxs,), gradients=(Gradient.FRESH, Gradient.NONE),
        )  # fmt: skip
        return made

    def in_heads(self, x: Handle, *sizes: int) -> list[Handle]:
        """Its heads' parts, each of (batch, heads, tokens, width)."""
        batch, tokens, _ = x.shape
        heads = x.view(batch, tokens, self.num_attention_heads, -1)
        return [each.permute(0, 2, 1, 3) for each in heads.split(*sizes, dim=3)]

    def attended(self, query: Handle, key: Handle, value: Handle) -> Handle:
        """Scores with offsets, the weighted values, and the projection of what is left of them."""
        batch, heads, queries, _ = query.shape
        attention = matmul(query, key.transpose(2, 3)) * 1.0
        attention = attention + self.get_attention_biases(queries, key.shape[2])
        attention = softmax(attention)
        hidden_state = matmul(attention, value).transpose(1, 2)
        hidden_state = hidden_state.reshape(batch, queries, heads * self.value_dim)
        hidden_state = self.projection(self.activation(hidden_state))
        return hidden_state


class LevitAttention(OffsetAttention):
    def __init__(self, size: int, heads: int, key_dim: int, ratio: int, resolution: int) -> None:
        super().__init__(heads, key_dim, ratio, resolution**2)
        self.queries_keys_values = MLPLayerWithBN(size, heads * (ratio + 2) * key_dim)
        self.projection = MLPLayerWithBN(heads * ratio * key_dim, size)

    def forward(self, hidden_state: Handle) -> Handle:
        queries_keys_values = self.queries_keys_values(hidden_state)
        key_dim = self.key_dim
        query, key, value = self.in_heads(queries_keys_values, key_dim, key_dim, self.value_dim)
        hidden_state = self.attended(query, key, value)
        return hidden_state


class LevitSubsample(Module):
    def __init__(self, stride: int, resolution: int) -> None:
        self.stride, self.resolution = stride, resolution

    def forward(self, hidden_state: Handle) -> Handle:
        batch, _, channels = hidden_state.shape
        fewer = (self.resolution - 1) // self.stride + 1
        grid = hidden_state.view(batch, self.resolution, self.resolution, channels)
        return grid.narrow(fewer, 1).narrow(fewer, 2).contiguous().view(batch, -1, channels)


class LevitAttentionSubsample(OffsetAttention):
    """Queries of every so many positions: what it gives has fewer."""

    def __init__(self, before: int, after: int, row: list[int], resolution: int) -> None:
        key_dim, heads, ratio, _, stride = row
        super().__init__(heads, key_dim, ratio, resolution**2)
        self.keys_values = MLPLayerWithBN(before, heads * (ratio + 1) * key_dim)
        self.queries_subsample = LevitSubsample(stride, resolution)
        self.queries = MLPLayerWithBN(before, heads * key_dim)
        self.projection = MLPLayerWithBN(heads * ratio * key_dim, after)

    def forward(self, hidden_state: Handle) -> Handle:
        key, value = self.in_heads(self.keys_values(hidden_state), self.key_dim, self.value_dim)
        query = self.queries(self.queries_subsample(hidden_state))
        batch, tokens, _ = query.shape
        query = query.view(batch, tokens, self.num_attention_heads, -1).permute(0, 2, 1, 3)
        hidden_state = self.attended(query, key, value)
        return hidden_state


def levit_network(size: int, inner: int) -> InOrder:
    """``LevitMLPLayer``."""
    network = InOrder(
        linear_up=MLPLayerWithBN(size, inner), activation=ActivationModule(Activation.HARDSWISH),
        linear_down=MLPLayerWithBN(inner, size),
    )  # fmt: skip
    network.block = LayerBlock.NETWORK
    return network


class LevitResidualLayer(Module):
    """Whole samples of what is added are left out at random."""

    def __init__(self, module: Module, drop_rate: float) -> None:
        self.module = module
        self.drop_rate = drop_rate

    def forward(self, hidden_state: Handle) -> Handle:
        if not self.drop_rate:
            return hidden_state + self.module(hidden_state)
        shape = hidden_state.shape[0], 1, 1
        rnd = made_by(self.run, OperationKind.UNIFORM_IN_PLACE, shape, DType.FP32) / 2.0
        hidden_state = hidden_state + self.module(hidden_state) * rnd
        return hidden_state


class LevitStage(Module):
    """Its ``layers``: those that are added, and, before the next stage, what narrows the picture."""

    def __init__(self, config: ConfigReader, index: int, row: list[int], resolution: int) -> None:
        depths = at_least_one(config, "depths")
        sizes, heads, keys, ratios = (
            each_stage(config, key, len(depths))
            for key in ("hidden_sizes", "num_attention_heads", "key_dim", "attention_ratio")
        )
        size, inner = sizes[index], each_stage(config, "mlp_ratio", len(depths), minimum=0)[index]
        drop_rate = config.number("drop_path_rate", default=0.0)

        def layer(kind: str) -> LevitResidualLayer:
            if kind == "network":
                return LevitResidualLayer(levit_network(size, size * inner), drop_rate)
            attention = LevitAttention(size, heads[index], keys[index], ratios[index], resolution)
            return LevitResidualLayer(attention, drop_rate)

        kinds = (["attention", "network"] if inner else ["attention"]) * depths[index]
        self.layers = LayerList(f"stages.{index}.layers", kinds, layer)
        self.resolution = resolution
        if row:
            after, count = sizes[index + 1], len(kinds)
            subsample = LevitAttentionSubsample(size, after, row, resolution)
            subsample.segment = f"stages.{index}.downsample", ModelPart.OTHER
            setattr(self, f"layers.{count}", subsample)
            if row[3]:
                network = levit_network(after, after * row[3])
                setattr(self, f"layers.{count + 1}", LevitResidualLayer(network, drop_rate))
            self.resolution = (resolution - 1) // row[4] + 1

    def forward(self, hidden_state: Handle) -> Handle:
        for layer in self.layers:
            hidden_state = layer(hidden_state)
        for narrowing in list(self.children.values())[1:]:
            hidden_state = narrowing(hidden_state)
        return hidden_state


class LevitEncoder(InOrder):
    def __init__(self, config: ConfigReader, sizes: list[int]) -> None:
        resolution = config.integer("image_size") // config.integer("patch_size")
        for index in range(len(sizes)):
            row = _down_operation(config, sizes, index) if index + 1 < len(sizes) else []
            stage = LevitStage(config, index, row, resolution)
            resolution = stage.resolution
            setattr(self, f"stages.{index}", stage)


def _down_operation(config: ConfigReader, sizes: list[int], index: int) -> list[int]:
    """Width of keys, heads, how many times wider values and the network are, and the stride.

    Where the config has no row, ``LevitConfig`` makes one.
    """
    given = config.sequence("down_ops")
    if not given:
        key = each_stage(config, "key_dim", len(sizes))[0]
        return [key, sizes[index] // key, 4, 2, 2]
    row = given[index] if index < len(given) else None
    numbers = row[1:] if isinstance(row, list) and row[:1] == ["Subsample"] else []
    found = [each for each in numbers if isinstance(each, int) and each >= 0]
    if len(found) != 5 or len(numbers) != 5 or not (found[0] and found[1] and found[4]):
        error = config.fail("down_ops", f"row {index} must be 'Subsample' and five whole numbers")
        raise error
    return found


class LevitForImageClassification(ImageClassification):
    names: tuple[str, ...] = ("classifier",)

    def add_head(self, config: ConfigReader) -> None:
        """A batch norm and a linear layer each."""
        del config
        for name in self.names if self.spec.num_labels else ():
            width, labels = self.model.width, self.spec.num_labels
            layer = InOrder(batch_norm=BatchNorm(width), linear=Linear(width, labels, bias=True))
            setattr(self, name, layer)

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The mean of all tokens, made anew."""
        del others
        return mean_of_tokens(last_hidden_state)


class LevitForImageClassificationWithTeacher(LevitForImageClassification):
    """The class makes no loss: it is taken to be that of the averaged logits."""

    names = ("classifier", "classifier_distill")

    def logits(self, vector: Handle) -> Handle:
        """Both classifiers' mean."""
        cls_logits, distill_logits = (self.children[name](vector) for name in self.names)
        return (cls_logits + distill_logits) / 2.0


class LevitModel(PictureModel):
    prefix = "levit"
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        IMAGES: LevitForImageClassification,
        "ForImageClassificationWithTeacher": LevitForImageClassificationWithTeacher,
    }

    def __init__(self, config: ConfigReader) -> None:
        depths = at_least_one(config, "depths")
        sizes = each_stage(config, "hidden_sizes", len(depths))
        self.width = sizes[-1]
        self.patch_embeddings = LevitPatchEmbeddings(config, sizes[0])
        self.encoder = LevitEncoder(config, sizes)
        self.picture = self.described(
            config.integer("image_size"), channels=config.integer("num_channels"), fixed=True
        )

    def forward(self, pixel_values: Handle) -> tuple[Handle, Handle]:
        embeddings = self.patch_embeddings(pixel_values)
        last_hidden_state = self.encoder(embeddings)
        with self.pooling(last_hidden_state):
            pooled_output = mean_of_tokens(last_hidden_state)
        return last_hidden_state, pooled_output
