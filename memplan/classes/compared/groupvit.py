"""GroupViT: patches that become groups, stage by stage, compared with texts.

(transformers 5.23, models/groupvit/modeling_groupvit.py)
"""

from memplan.classes.compared.clip import (
    CLIPEncoderLayer,
    CLIPTextModel,
    SiglipAttention,
    Tower,
    patches_across,
)
from memplan.classes.compared.two_towers import ONE_CLASS, NormsDivide
from memplan.classes.pictures.base import begin
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.classes.pictures.vit import two_linear
from memplan.classes.pictures.vitmatte import ReluInPlace
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import at_least_one, stage_ratios
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, in_heads
from memplan.graph.modules.basic import Dropout, LayerNorm, Linear, dropout
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import (
    divide,
    expanded,
    made_from,
    mean_of_tokens,
    softmax,
    total,
)
from memplan.graph.modules.grids import BatchNorm, Conv2d
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.unread import UnreadGraph
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart


class GroupViTEmbeddings(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        channels, patch = config.integer("num_channels"), config.integer("patch_size")
        projection = Conv2d(channels, size, patch, stride=(patch, patch))
        self.patch_embeddings = InOrder(projection=projection)
        self.position_embeddings = Weight(1, patches_across(config) ** 2, size)
        self.dropout = Dropout(config.number("dropout", default=0.0))
        self.layernorm = LayerNorm(size)

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings = as_tokens(self.patch_embeddings(pixel_values))
        embeddings = self.layernorm(embeddings)
        embeddings = embeddings + self.operand(self.position_embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class GroupViTAttention(SiglipAttention):
    """Queries are scaled at once, heads copied, scores written out in their own format."""

    def forward(self, hidden_states: Handle, attention_mask: Handle | None = None) -> Attended:
        return self.cross(hidden_states, hidden_states, attention_mask)

    def cross(self, hidden_states: Handle, read: Handle, attention_mask: Handle | None) -> Attended:
        """Of tokens that read others, or themselves."""
        batch, targets, size = hidden_states.shape
        query_states = self.q_proj(hidden_states) * 0.5
        key_states = in_heads(self.k_proj(read), self.head_dim).contiguous()
        value_states = in_heads(self.v_proj(read), self.head_dim).contiguous()
        heads = key_states.shape[1]
        rows = batch * heads
        query_states = in_heads(query_states, self.head_dim).contiguous()
        query_states = query_states.view(rows, -1, self.head_dim)
        key_states = key_states.view(rows, -1, self.head_dim)
        value_states = value_states.view(rows, -1, self.head_dim)
        attn_weights = matmul(query_states, key_states.transpose(1, 2))
        if attention_mask is not None:
            attn_weights = attn_weights.view(batch, heads, targets, -1) + attention_mask
            attn_weights = attn_weights.view(rows, targets, -1)
        attn_weights = softmax(attn_weights)
        attn_probs = dropout(attn_weights, self.probability)
        attn_output = matmul(attn_probs, value_states)
        attn_output = attn_output.view(batch, heads, targets, self.head_dim)
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(batch, targets, size)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


def network(config: ConfigReader, size: int, inner: int, outputs: int) -> InOrder:
    """``GroupViTMLP``."""
    made = two_linear(size, inner, tower_activation(config, "hidden_act"))
    made.fc2 = Linear(inner, outputs, bias=True)
    return made


class MixerMLP(Module):
    """Across tokens, of each channel."""

    block = LayerBlock.NETWORK

    def __init__(self, mlp: InOrder) -> None:
        for name, each in mlp.children.items():
            setattr(self, name, each)

    def forward(self, x: Handle) -> Handle:
        x = x.transpose(1, 2)
        for each in self.children.values():
            x = each(x)
        return x.transpose(1, 2)


class CrossAttentionLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        inner = config.integer("intermediate_size")
        self.attn = GroupViTAttention(config, size)
        self.norm2 = LayerNorm(size)
        self.mlp = network(config, size, inner, size)
        self.norm_post = LayerNorm(size)

    def forward(self, query: Handle, key: Handle) -> Handle:
        x = query
        x = x + self.attn.cross(query, key, None)[0]
        x = x + self.mlp(self.norm2(x))
        x = self.norm_post(x)
        return x


class AssignAttention(Module):
    """Gumbel noise, one group for each patch, shares of a group."""

    block = LayerBlock.ATTENTION

    def __init__(self, size: int) -> None:
        for name in ("q_proj", "k_proj", "v_proj", "proj"):
            setattr(self, name, Linear(size, size, bias=True))

    def forward(self, query: Handle, key: Handle) -> tuple[Handle, Handle]:
        value = key
        query = self.children["q_proj"](query)
        key = self.children["k_proj"](key)
        value = self.children["v_proj"](value)
        raw_attn = matmul(query, key.transpose(1, 2)) * 0.5
        attn = self.gumbel_softmax(raw_attn)
        with UnreadGraph(self.run):
            soft_attn = softmax(raw_attn)
        attn = divide(attn, total(attn) + 1.0)
        out = matmul(attn, value)
        out = self.children["proj"](out)
        return out, soft_attn

    def gumbel_softmax(self, logits: Handle) -> Handle:
        """Straight through: what it gives is one for the greatest of each patch's, else zero."""
        gumbels = made_by(self.run, OperationKind.GUMBEL, logits.shape, logits.dtype)
        gumbels = (logits + gumbels) / 1.0
        y_soft = softmax(gumbels)
        batch, _, patches = logits.shape
        index = made_from(OperationKind.MAX, (batch, 1, patches), DType.INT64, y_soft)
        y_hard = made_by(self.run, OperationKind.ZEROS, logits.shape, logits.dtype)
        ret = y_hard.apart(OperationKind.SUB, index, dtype=y_soft.dtype) + y_soft
        return ret


class TokenAssign(Module):
    def __init__(self, config: ConfigReader, size: int, count: int, outputs: int) -> None:
        shares = stage_ratios(config, "assign_mlp_ratio", 2)
        tokens, channels = int(shares[0] * size), int(shares[1] * size)
        self.norm_tokens = LayerNorm(size)
        self.mlp_inter = MixerMLP(network(config, count, tokens, outputs))
        self.norm_post_tokens = LayerNorm(size)
        self.norm_x = LayerNorm(size)
        self.pre_assign_attn = CrossAttentionLayer(config, size)
        self.assign = AssignAttention(size)
        self.norm_new_x = LayerNorm(size)
        self.mlp_channels = network(config, size, channels, size)

    def forward(self, image_tokens: Handle, group_tokens: Handle) -> tuple[Handle, Handle]:
        group_tokens = self.norm_tokens(group_tokens)
        image_tokens = self.norm_x(image_tokens)
        projected_group_tokens = self.mlp_inter(group_tokens)
        projected_group_tokens = self.norm_post_tokens(projected_group_tokens)
        projected_group_tokens = self.pre_assign_attn(projected_group_tokens, image_tokens)
        new_image_tokens, attention = self.assign(projected_group_tokens, image_tokens)
        new_image_tokens += projected_group_tokens
        new_image_tokens = new_image_tokens + self.mlp_channels(self.norm_new_x(new_image_tokens))
        return new_image_tokens, attention


class GroupViTStage(Module):
    """Without tokens of groups it merges nothing."""

    def __init__(
        self, config: ConfigReader, index: int, sizes: tuple[int, int, int], before: int
    ) -> None:
        (depth, self.count, outputs), size = sizes, config.integer("hidden_size")
        self.name = f"vision_model.stages.{index}"
        if self.count:
            self.group_token = Weight(1, self.count, size)

        def layer(_: int) -> CLIPEncoderLayer:
            return CLIPEncoderLayer(config, GroupViTAttention(config, size))

        self.layers = LayerList(f"{self.name}.layers", [None] * depth, layer)
        if self.count:
            self.downsample = TokenAssign(config, size, self.count, outputs)
        if self.count and before:
            mixer = MixerMLP(network(config, before, size // 2, self.count))
            self.group_projector = InOrder(_0=LayerNorm(size), _1=mixer)

    def forward(
        self, hidden_states: Handle, prev_group_token: Handle | None
    ) -> tuple[Handle, Handle | None]:
        cat_x, group_token = hidden_states, None
        if self.count:
            begin(self, f"{self.name}.begin", ModelPart.OTHER, hidden_states)
            group_token = self.begun(hidden_states, prev_group_token)
            cat_x = concatenate(hidden_states, group_token, dim=1)
        for layer in self.layers:
            cat_x = layer(cat_x, None)
        if not self.count:
            return cat_x, None
        begin(self, f"{self.name}.assign", ModelPart.OTHER, cat_x)
        x, group_token = cat_x.narrow(cat_x.shape[1] - self.count, 1), cat_x.narrow(self.count, 1)
        x, _ = self.downsample(x, group_token)
        return x, group_token

    def begun(self, hidden_states: Handle, prev_group_token: Handle | None) -> Handle:
        """Tokens of groups, with what brings those of the stage before along."""
        batch, _, size = hidden_states.shape
        group_token = expanded(self.operand(self.group_token), (batch, self.count, size))
        if "group_projector" in self.children:
            group_token = group_token + self.group_projector(prev_group_token)
        return group_token


class GroupViTVisionModel(Tower):
    prefix = tower = "vision_model"

    def __init__(self, config: ConfigReader) -> None:
        depths, size = at_least_one(config, "depths"), config.integer("hidden_size")
        self.width, self.context = size, patches_across(config) ** 2
        groups, outputs = (
            config.integers("num_group_tokens"), config.integers("num_output_groups"),
        )  # fmt: skip
        if not len(depths) == len(groups) == len(outputs):
            error = config.fail("depths", "num_group_tokens and num_output_groups must be as many")
            raise error
        self.embeddings = GroupViTEmbeddings(config, size)
        self.stages = []
        for index, sizes in enumerate(zip(depths, groups, outputs, strict=True)):
            stage = GroupViTStage(config, index, sizes, outputs[index - 1] if index else 0)
            setattr(self, f"encoder.stages.{index}", stage)
            self.stages.append(stage)
        self.layernorm = LayerNorm(size)
        side, channels = config.integer("image_size"), config.integer("num_channels")
        self.picture = self.described(side, channels=channels, fixed=True)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        layer_outputs: tuple[Handle, Handle | None] = (hidden_states, None)
        last_hidden_state, group_tokens = layer_outputs
        for stage in self.stages:
            layer_outputs = stage(last_hidden_state, group_tokens)
            last_hidden_state, group_tokens = layer_outputs
        del group_tokens, layer_outputs
        begin(self, "vision_model.norm", ModelPart.NORM, last_hidden_state)
        last_hidden_state = self.layernorm(last_hidden_state)
        pooled_output = mean_of_tokens(last_hidden_state)
        return last_hidden_state, pooled_output


class GroupViTTextModel(CLIPTextModel):
    attention_class = GroupViTAttention


def projection(size: int, inner: int, outputs: int) -> InOrder:
    """Two linear layers around a batch norm and a nonlinearity."""
    return InOrder(
        _0=Linear(size, inner, bias=True), _1=BatchNorm(inner), _2=ReluInPlace(),
        _3=Linear(inner, outputs, bias=True),
    )  # fmt: skip


class GroupViTModel(NormsDivide):
    family = "groupvit"
    endings = ONE_CLASS
    eager_only = True
    text_class = GroupViTTextModel
    vision_class = GroupViTVisionModel

    def add_own(self, config: ConfigReader) -> None:
        """Both projections, and the temperature."""
        inner, width = (
            config.integer("projection_intermediate_dim"), config.integer("projection_dim"),
        )  # fmt: skip
        self.visual_projection = projection(self.vision_model.width, inner, width)
        self.text_projection = projection(self.text_width, inner, width)
        self.logit_scale = Weight()
