"""Qwen2-VL and its kin: a tower that ends in the text's width, and positions of three axes.

(transformers 5.23, modeling_*.py of models/qwen2_vl, models/qwen2_5_vl, models/qwen3_vl)
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from memplan.classes.joined.base import TOWER, JoinedModel
from memplan.classes.joined.packed import (
    AxialRotaryEmbedding,
    PackedTower,
    Stretches,
    VisionAttention,
    collected,
    equal_stretches,
    interpolated,
    window_side,
)
from memplan.classes.llama import GatedMLP
from memplan.classes.pictures.base import begin, begin_tower
from memplan.classes.pictures.parts import InOrder
from memplan.classes.pictures.vit import two_linear
from memplan.classes.three_axes import SectionedModel
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import ratio
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import (
    ActivationModule,
    Embedding,
    LayerNorm,
    Linear,
    Norm,
    RMSNorm,
    spare,
)
from memplan.graph.modules.functional import index, made_from
from memplan.graph.modules.grids import Conv3d
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart


class PatchEmbed(Module):
    def __init__(self, config: ConfigReader, size: int, *, bias: bool) -> None:
        patch = config.integer("patch_size")
        window = config.integer("temporal_patch_size"), patch, patch
        self.proj = Conv3d(config.integer("in_channels"), size, window, bias=bias)

    def forward(self, hidden_states: Handle) -> Handle:
        size, *window = self.proj.weight.shape
        hidden_states = hidden_states.view(-1, *window)
        hidden_states = self.proj(hidden_states.to(self.run.compute)).view(-1, size)
        return hidden_states


class PatchMerger(Module):
    """Neighbouring patches joined, and a perceptron."""

    def __init__(self, norm: Norm, merged: int, outputs: int) -> None:
        self.ln_q, self.merged = norm, merged
        self.mlp = InOrder(
            _0=Linear(merged, merged, bias=True), _1=ActivationModule(Activation.GELU),
            _2=Linear(merged, outputs, bias=True),
        )  # fmt: skip

    def forward(self, x: Handle) -> Handle:
        x = self.mlp(self.ln_q(x).view(-1, self.merged))
        return x


class VisionBlock(Module):
    def __init__(self, attention: Module, network: Module, *norms: Norm) -> None:
        self.norm1, self.norm2 = norms
        self.attn = attention
        self.mlp = network

    def forward(self, hidden_states: Handle, stretches: Stretches, tables: Tables | None) -> Handle:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), stretches, tables)
        hidden_states = hidden_states + self.mlp(self.norm2(hidden_states))
        return hidden_states


class QwenTower(PackedTower):
    """Patches, positions, layers, and what joins neighbouring patches."""

    width_key = "hidden_size"
    patch_bias = False
    attention_class: type[VisionAttention] = VisionAttention
    norm_class: type[Norm] = LayerNorm
    first_bias = False
    blocks: LayerList
    merger: Module

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer(self.width_key)
        self.frames_spanned = config.integer("temporal_patch_size")
        self.joins = config.integer("spatial_merge_size")
        self.merged = self.width * self.joins**2
        self.add_embeddings(config)
        heads = config.integer("num_heads")
        head_dim = config.divide(self.width_key, self.width, "num_heads", heads)
        self.rotary_pos_emb = AxialRotaryEmbedding(head_dim)
        self.blocks = LayerList("layers", self.kinds(config), lambda _: self.layer(config))
        self.add_merger(config)
        patch = config.integer("patch_size")
        self.cut_into(patch, patch, channels=config.integer("in_channels"))

    def kinds(self, config: ConfigReader) -> Sequence[bool | None]:
        """Of each layer, whether it sees a window of the picture alone; None where none does."""
        return [None] * config.layers("depth")

    def add_embeddings(self, config: ConfigReader) -> None:
        """What makes tokens of patches."""
        self.patch_embed = PatchEmbed(config, self.width, bias=self.patch_bias)

    def layer(self, config: ConfigReader) -> Module:
        """One of its layers."""
        norms = self.norm_class(self.width), self.norm_class(self.width)
        return VisionBlock(self.attention_class(config, self.width), self.network(config), *norms)

    def network(self, config: ConfigReader) -> Module:
        """That of a layer."""
        raise NotImplementedError

    def add_merger(self, config: ConfigReader) -> None:
        """What ends it."""
        raise NotImplementedError

    def forward(self, hidden_states: Handle) -> tuple[Handle, ...]:
        hidden_states = self.patch_embed(hidden_states)
        pictures = equal_stretches(hidden_states.shape[0], self.num_pictures)
        hidden_states = self.placed(hidden_states)
        position_embeddings = self.rotary_pos_emb.of_patches(hidden_states.shape[0])
        for blk in self.blocks:
            hidden_states = blk(hidden_states, pictures, position_embeddings)
        begin(self, f"{self.tower}.merger", ModelPart.OTHER, hidden_states)
        return self.merged_states(hidden_states)

    def placed(self, hidden_states: Handle) -> Handle:
        """With positions added, where the class has a table of them."""
        return hidden_states

    def merged_states(self, hidden_states: Handle) -> tuple[Handle, ...]:
        """What its layers gave, and what is made of it for the text."""
        return hidden_states, self.merger(hidden_states)


class Qwen2VLVisionModel(QwenTower):
    width_key = "embed_dim"

    def network(self, config: ConfigReader) -> Module:
        inner = int(self.width * ratio(config, "mlp_ratio"))
        return two_linear(self.width, inner, tower_activation(config, "hidden_act"))

    def add_merger(self, config: ConfigReader) -> None:
        norm = LayerNorm(self.width)
        self.merger = PatchMerger(norm, self.merged, config.integer("hidden_size"))


class BiasedMLP(GatedMLP):
    def bias(self, config: ConfigReader) -> bool:
        del config
        return True


class Qwen25VLVisionModel(QwenTower):
    """Most layers attend in windows, in whose order the patches lie meanwhile."""

    norm_class = RMSNorm

    def kinds(self, config: ConfigReader) -> Sequence[bool]:
        window, patch = config.integer("window_size", default=112), config.integer("patch_size")
        self.side = window_side(config, "window_size", window // patch, self.joins)
        full = set(config.integers("fullatt_block_indexes"))
        return [number not in full for number in range(config.layers("depth"))]

    def network(self, config: ConfigReader) -> Module:
        return BiasedMLP(config)

    def add_merger(self, config: ConfigReader) -> None:
        norm = RMSNorm(self.width)
        self.merger = PatchMerger(norm, self.merged, config.integer("out_hidden_size"))

    def forward(self, hidden_states: Handle) -> tuple[Handle, ...]:
        hidden_states = self.patch_embed(hidden_states)
        rows = hidden_states.shape[0]
        pictures, windows = equal_stretches(rows, self.num_pictures), self.windows(self.side)
        units = rows * self.width // self.merged
        window_index = made_by(self.run, OperationKind.ARANGE, (units,), DType.INT64)
        hidden_states = index(hidden_states, window_index, hidden_states.shape)
        cos, sin = self.rotary_pos_emb.of_patches(rows)
        cos = made_from(OperationKind.INDEX, cos.shape, DType.FP32, cos)
        sin = made_from(OperationKind.INDEX, sin.shape, DType.FP32, sin)
        for blk in self.blocks:
            hidden_states = blk(hidden_states, windows if blk.kind else pictures, (cos, sin))
        begin(self, f"{self.tower}.merger", ModelPart.OTHER, hidden_states)
        reverse_indices = made_by(self.run, OperationKind.ARANGE, (units,), DType.INT64)
        merged_hidden_states = self.merger(hidden_states)
        merged_hidden_states = index(
            merged_hidden_states, reverse_indices, merged_hidden_states.shape
        )
        return hidden_states, merged_hidden_states


class Qwen3VLVisionPatchMerger(Module):
    """Single patches are normed, or joined ones (``use_postshuffle_norm``)."""

    def __init__(self, width: int, merged: int, outputs: int, *, joined: bool) -> None:
        self.merged, self.joined = merged, joined
        self.norm = LayerNorm(merged if joined else width)
        self.linear_fc1 = Linear(merged, merged, bias=True)
        self.act_fn = ActivationModule(Activation.GELU)
        self.linear_fc2 = Linear(merged, outputs, bias=True)

    def forward(self, x: Handle) -> Handle:
        x = self.norm(x.view(-1, self.merged) if self.joined else x).view(-1, self.merged)
        x = self.linear_fc2(self.act_fn(self.linear_fc1(x)))
        return x


class Qwen35VisionModel(QwenTower):
    """A table of positions, of which each patch's is mixed from four rows."""

    patch_bias = True

    def add_embeddings(self, config: ConfigReader) -> None:
        super().add_embeddings(config)
        self.pos_embed = Embedding(config.integer("num_position_embeddings"), self.width)

    def network(self, config: ConfigReader) -> Module:
        active = tower_activation(config, "hidden_act")
        return Qwen3VLVisionMLP(self.width, config.integer("intermediate_size"), active)

    def add_merger(self, config: ConfigReader) -> None:
        self.outputs = config.integer("out_hidden_size")
        self.merger = Qwen3VLVisionPatchMerger(self.width, self.merged, self.outputs, joined=False)

    def placed(self, hidden_states: Handle) -> Handle:
        pos_embeds = interpolated(self.pos_embed, hidden_states.shape[0])
        hidden_states = hidden_states + pos_embeds.to(hidden_states.dtype)
        return hidden_states


class Qwen3VLVisionModel(Qwen35VisionModel):
    """What some layers give is merged too, for the text's first layers."""

    def add_merger(self, config: ConfigReader) -> None:
        super().add_merger(config)
        depth = config.integer("depth")
        listed = config.integers("deepstack_visual_indexes")
        # Of a layer that is not there nothing is merged: its merger stands idle.
        self.deep = [number for number in listed if number < depth]
        mergers = [
            Qwen3VLVisionPatchMerger(self.width, self.merged, self.outputs, joined=True)
            for _ in listed
        ]
        self.deepstack_merger_list = InOrder(**{f"_{at}": each for at, each in enumerate(mergers)})
        self.blocks.capture(*(number + 1 for number in self.deep), is_read=True)

    def merged_states(self, hidden_states: Handle) -> tuple[Handle, ...]:
        states, features = self.blocks.take_states(), []
        mergers = list(self.deepstack_merger_list.children.values())
        for number, merger in zip(self.deep, mergers, strict=False):
            features.append(merger(states.pop(number + 1)))
        for each in mergers[len(self.deep) :]:
            spare(each)
        return hidden_states, self.merger(hidden_states), *features


class Qwen3VLVisionMLP(InOrder):
    block = LayerBlock.NETWORK

    def __init__(self, size: int, inner: int, active: Activation) -> None:
        super().__init__(
            linear_fc1=Linear(size, inner, bias=True), act_fn=ActivationModule(active),
            linear_fc2=Linear(inner, size, bias=True),
        )  # fmt: skip


class VisualModel(JoinedModel):
    """A tower that gives what is written over the placeholders."""

    sees = "visual"
    text: ClassVar[PartSpec] = PartSpec(key="text_config")
    returns_features = False

    def __init__(self, config: ConfigReader) -> None:
        self.add_tower(config)
        self.add_text(config)

    @property
    def eye(self) -> Any:
        """The tower, with what its own class says of it."""
        return super().eye

    def seen(self, inputs_embeds: Handle) -> tuple[Handle, ...]:
        made = super().seen(inputs_embeds)
        if self.is_shown:
            self.place(*inputs_embeds.shape[:2])
        return made

    def place(self, batch: int, length: int) -> None:
        """What the batch says of each picture's sides, and of each token whether it is a picture's; positions of three axes,
        which are named until the text model has returned."""
        run = self.run
        from_batch(run, 3 * self.eye.num_pictures, DType.INT64)
        if isinstance(self.words, SectionedModel):
            from_batch(run, batch * length, DType.INT64)
            self.named.append(made_by(run, OperationKind.ZEROS, (3, batch, length), DType.INT64))

    def get_image_features(self) -> Handle:
        begin_tower(self.eye, TOWER)
        vision_outputs = self.eye(self.pictures())
        self.named += vision_outputs
        image_features: Handle = vision_outputs[1]
        return image_features

    def collected(self, image_features: Handle) -> Handle:
        return collected(image_features, self.eye.num_pictures)


class Qwen2VLModel(VisualModel):
    """Published files have the text's keys in the outer config."""

    text: ClassVar[PartSpec] = PartSpec(key="text_config", flat=True)
    nested_ties = True


class Qwen3VLModel(VisualModel):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.words.layers.capture(*range(1, len(self.eye.deep) + 1), is_read=True)

    def seen(self, inputs_embeds: Handle) -> tuple[Handle, ...]:
        made = super().seen(inputs_embeds)
        if not self.is_shown:
            return made
        deepstack_features = self.named[2 : 2 + len(self.eye.deep)]
        found = (each for each in deepstack_features if isinstance(each, Handle))
        return *made, *map(self.collected, found)
