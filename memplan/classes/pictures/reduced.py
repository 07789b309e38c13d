"""PVT: keys and values come from a smaller picture.

(transformers 5.23, models/pvt/modeling_pvt.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import (
    IMAGES,
    FirstToken,
    PictureModel,
    PictureTask,
    begin,
)
from memplan.classes.pictures.parts import (
    InOrder,
    Projected,
    RowsLinear,
    as_picture,
    as_tokens,
    drop_paths,
    laid_as_picture,
    mixed_by_scores,
    read_as_picture,
    stage_layers,
)
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, stage_ratios
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import expanded
from memplan.graph.modules.grids import Conv2d, DropPath, interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart


class Stage:
    """What the config says of a stage."""

    bias_key = ""
    """The key that says whether queries, keys and values have biases; empty: they have."""
    reductions = "sequence_reduction_ratios"

    def __init__(self, config: ConfigReader, index: int) -> None:
        count = config.layers("num_encoder_blocks")

        def of_stage(key: str) -> int:
            return each_stage(config, key, count)[index]

        self.config, self.index, self.is_last = config, index, index + 1 == count
        self.size = of_stage("hidden_sizes")
        before = each_stage(config, "hidden_sizes", count)[index - 1]
        self.channels = before if index else config.integer("num_channels")
        self.heads = of_stage("num_attention_heads")
        config.divide("hidden_sizes", self.size, "num_attention_heads", self.heads)
        self.patch_size, self.stride = of_stage("patch_sizes"), of_stage("strides")
        self.reduction = of_stage(self.reductions)
        self.inner = int(self.size * stage_ratios(config, "mlp_ratios", count)[index])
        self.depth = of_stage("depths")
        self.bias = not self.bias_key or config.flag(self.bias_key)
        self.dropout = config.number("hidden_dropout_prob", default=0.0)


class EfficientSelfAttention(Module):
    reduces = "sequence_reduction"
    """What the class calls the convolution."""

    def __init__(self, stage: Stage) -> None:
        size, ratio = stage.size, stage.reduction
        self.num_heads = stage.heads
        for name in ("query", "key", "value"):
            setattr(self, name, Linear(size, size, bias=stage.bias))
        probability = stage.config.number("attention_probs_dropout_prob", default=0.0)
        self.dropout = Dropout(probability)
        if ratio > 1:
            setattr(self, self.reduces, Conv2d(size, size, ratio, stride=ratio))
            self.layer_norm = LayerNorm(size)

    def in_heads(self, x: Handle) -> Handle:
        batch, tokens, size = x.shape
        return x.view(batch, tokens, self.num_heads, size // self.num_heads).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Handle, height: int, width: int) -> Handle:
        query_layer = self.in_heads(self.children["query"](hidden_states))
        reduces = self.children.get(self.reduces)
        if reduces is not None:
            hidden_states = as_picture(hidden_states, height, width)
            hidden_states = reduces(hidden_states)
            hidden_states = as_tokens(hidden_states)
            hidden_states = self.layer_norm(hidden_states)
        key_layer = self.in_heads(self.children["key"](hidden_states))
        value_layer = self.in_heads(self.children["value"](hidden_states))
        return mixed_by_scores(query_layer, key_layer, value_layer, self.dropout)


class Layer(Module):
    """``PvtLayer`` and ``GLPNLayer``."""

    attention_class: type[EfficientSelfAttention] = EfficientSelfAttention

    def __init__(self, stage: Stage, drop_path: float) -> None:
        self.layer_norm_1 = LayerNorm(stage.size)
        inner = self.attention_class(stage)
        self.attention = Projected("self", inner, stage.size, stage.dropout)
        self.drop_path = DropPath(drop_path)
        self.layer_norm_2 = LayerNorm(stage.size)
        self.mlp = self.network(stage)

    def network(self, stage: Stage) -> Module:
        """``PvtFFN``."""
        drop = stage.dropout
        network = InOrder(
            dense1=Linear(stage.size, stage.inner, bias=True),
            intermediate_act_fn=ActivationModule(tower_activation(stage.config, "hidden_act")),
            dropout=Dropout(drop),
            dense2=RowsLinear(stage.inner, stage.size, bias=True),
            dropout_again=Dropout(drop),
        )
        network.block = LayerBlock.NETWORK
        return network

    def fed(self, hidden_states: Handle, height: int, width: int) -> Handle:  # noqa: ARG002
        """What the network gives of it."""
        found: Handle = self.mlp(hidden_states)
        return found

    def forward(self, hidden_states: Handle, height: int, width: int) -> Handle:
        attention_output = self.attention(self.layer_norm_1(hidden_states), height, width)
        attention_output = self.drop_path(attention_output)
        hidden_states = attention_output + hidden_states
        mlp_output = self.fed(self.layer_norm_2(hidden_states), height, width)
        mlp_output = self.drop_path(mlp_output)
        layer_output = hidden_states + mlp_output
        return layer_output


class Encoder(Module):
    """Stages: embeddings, layers, a norm behind the last one or each."""

    stage_class: type[Stage] = Stage
    layer_class: type[Layer] = Layer
    begins = ""
    """How names of its segments begin."""

    def __init__(self, config: ConfigReader) -> None:
        count = config.layers("num_encoder_blocks")
        stages = [self.stage_class(config, each) for each in range(count)]
        rates = drop_paths(config, sum(each.depth for each in stages))
        for stage in stages:
            setattr(self, f"patch_embeddings.{stage.index}", self.embeddings(stage))
        before = 0
        for stage in stages:
            own = rates[before : before + stage.depth]
            setattr(self, f"block.{stage.index}", self.layers(stage, own))
            before += stage.depth
        self.stages = stages
        self.add_norms(stages)

    def begin_stage(self, stage: Stage, hidden_states: Handle) -> None:
        """What stands before a stage's layers begins."""
        if stage.index:
            name = f"{self.begins}stages.{stage.index}.embed"
            begin(self, name, ModelPart.EMBEDDING, hidden_states)

    def layers(self, stage: Stage, rates: list[float]) -> LayerList:
        """Layers of a stage, which differ in whether they drop anything."""
        name = f"{self.begins}stages.{stage.index}.layers"
        return stage_layers(
            name, rates, lambda rate: self.layer_class(stage, rate), behind=stage.index > 0
        )

    def embeddings(self, stage: Stage) -> Module:
        """What makes tokens of a picture."""
        raise NotImplementedError

    def add_norms(self, stages: list[Stage]) -> None:
        """Declare the norms."""
        raise NotImplementedError


class PvtPatchEmbeddings(Module):
    """The stride is the kernel's size, positions are counted in patches: the table is resized though it fits."""

    def __init__(self, stage: Stage) -> None:
        config, size = stage.config, stage.size
        self.is_last = stage.is_last
        side = config.integer("image_size") // (2 ** (stage.index + 1) if stage.index else 1)
        rows = (side // stage.patch_size) ** 2 + stage.is_last
        self.position_embeddings = Weight(1, rows, size)
        if stage.is_last:
            self.cls_token = Weight(1, 1, size)
        self.projection = Conv2d(stage.channels, size, stage.stride, stride=stage.patch_size)
        self.layer_norm = LayerNorm(size)
        self.dropout = Dropout(stage.dropout)

    def interpolate_pos_encoding(self, embeddings: Handle, height: int, width: int) -> Handle:
        """``reshape`` is a view of the positions that there are."""
        run, size = self.run, embeddings.shape[-1]
        grid = Handle(run, embeddings.record, (1, size, height, width))
        made = interpolate(grid, height, width)
        return made.view(1, size, height * width).permute(0, 2, 1)

    def forward(self, pixel_values: Handle) -> tuple[Handle, int, int]:
        patch_embed = self.projection(pixel_values)
        batch, size, height, width = patch_embed.shape
        patch_embed = patch_embed.view(batch, size, height * width).transpose(1, 2)
        embeddings = self.layer_norm(patch_embed)
        table = self.operand(self.position_embeddings)
        if "cls_token" in self.weights:
            cls_token = expanded(self.operand(self.cls_token), (batch, 1, size))
            embeddings = concatenate(cls_token, embeddings, dim=1)
            rest = table.narrow(table.shape[1] - 1, 1)
            position_embeddings = self.interpolate_pos_encoding(rest, height, width)
            position_embeddings = concatenate(table.narrow(1, 1), position_embeddings, dim=1)
        else:
            position_embeddings = self.interpolate_pos_encoding(table, height, width)
        embeddings = self.dropout(embeddings + position_embeddings)
        if not self.is_last:
            embeddings = read_as_picture(embeddings)
        return embeddings, height, width


class PvtStage(Stage):
    bias_key = "qkv_bias"


class PvtLayer(Layer):
    """Of a stage behind which a picture is made of the tokens: their gradients come as one."""

    def __init__(self, stage: Stage, drop_path: float) -> None:
        super().__init__(stage, drop_path)
        self.is_last = stage.is_last

    def forward(self, hidden_states: Handle, height: int, width: int) -> Handle:
        layer_output = super().forward(hidden_states, height, width)
        return layer_output if self.is_last else read_as_picture(layer_output)


class PvtEncoder(Encoder):
    stage_class = PvtStage
    layer_class = PvtLayer

    def embeddings(self, stage: Stage) -> Module:
        """With positions."""
        return PvtPatchEmbeddings(stage)

    def add_norms(self, stages: list[Stage]) -> None:
        """One behind the last stage."""
        self.layer_norm = LayerNorm(stages[-1].size)
        self.layer_norm.segment = "norm", ModelPart.NORM

    def forward(self, pixel_values: Handle) -> Handle:
        hidden_states = pixel_values
        height = width = 0
        for stage in self.stages:
            embed, layers = (
                self.children[f"{name}.{stage.index}"] for name in ("patch_embeddings", "block")
            )
            if stage.index:
                self.begin_stage(stage, hidden_states)
                self.run.outlive(hidden_states.record.storage)  # named until another layer returns
                hidden_states = laid_as_picture(hidden_states, height, width)
            hidden_states, height, width = embed(hidden_states)
            assert isinstance(layers, LayerList)
            for block in layers:
                layer_outputs = block(hidden_states, height, width)
                hidden_states = layer_outputs
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class PvtModel(PictureModel):
    prefix = "pvt"
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: FirstToken}

    def __init__(self, config: ConfigReader) -> None:
        self.encoder = PvtEncoder(config)
        self.width = self.encoder.stages[-1].size
        self.picture = self.described(
            config.integer("image_size"), channels=config.integer("num_channels"), fixed=True
        )

    def forward(self, pixel_values: Handle) -> tuple[Handle]:
        return (self.encoder(pixel_values),)
