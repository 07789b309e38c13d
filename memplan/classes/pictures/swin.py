"""Swin Transformer V2: attention in shifted windows, patches merged between stages.

(transformers 5.23, models/swinv2/modeling_swinv2.py)
"""

from memplan.classes.pictures.parts import InOrder, Projected, drop_paths
from memplan.classes.pictures.patches import Embeddings, Stage, StagedEncoder, StagedModel
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, pair, ratio
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import in_heads, matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import clamped, index, padded, softmax
from memplan.graph.modules.grids import DropPath
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.run import Run
from memplan.model.config import ConfigReader

POSITION_WIDTH = 512
"""Inside the network that makes position biases (``Swinv2SelfAttention``)."""


def window_partition(input_feature: Handle, side: int) -> Handle:
    """(batch, height, width, channels) as windows, a copy."""
    batch, height, width, channels = input_feature.shape
    windows = input_feature.view(batch, height // side, side, width // side, side, channels)
    return windows.transpose(2, 3).contiguous().view(-1, side, side, channels)


def window_reverse(windows: Handle, side: int, height: int, width: int) -> Handle:
    """Windows as a picture again, a copy."""
    channels = windows.shape[-1]
    windows = windows.view(-1, height // side, width // side, side, side, channels)
    return windows.transpose(2, 3).contiguous().view(-1, height, width, channels)


def normalize(x: Handle) -> Handle:
    """``F.normalize(x, dim=-1)``: under autocast norms are fp32, and so is what they divide."""
    run = x.run
    dtype = x.dtype if run.autocast is None else DType.FP32
    norms, made = empty(run, (*x.shape[:-1], 1), dtype), run.tensor(x.numel, dtype)
    run.record(
        OperationKind.VECTOR_NORM, (x.record,), (norms.record,), saves=(x.record, norms.record),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    least = norms.unary(OperationKind.CLAMP)
    run.record(
        OperationKind.DIV, (x.record, least.record), (made,), saves=(x.record, least.record),
        gradients=(Gradient.FRESH, 3 * made.storage.num_bytes),
    )  # fmt: skip
    return x.like(made)


class PositionBias(Module):
    """``continuous_position_bias_mlp``: a small network on each distance; ReLU in place."""

    def __init__(self, heads: int) -> None:
        setattr(self, "0", Linear(2, POSITION_WIDTH, bias=True))
        setattr(self, "2", Linear(POSITION_WIDTH, heads))

    def forward(self, relative_coords_table: Handle) -> Handle:
        run, x = self.run, self.children["0"](relative_coords_table)
        made = run.view(x.record, x.numel)
        run.record(
            OperationKind.RELU, (x.record,), (made,), saves=(made,), gradients=(Gradient.FRESH,)
        )
        x = x.like(made)
        return self.children["2"](x)


class Swinv2SelfAttention(Module):
    def __init__(self, config: ConfigReader, size: int, heads: int, window: int) -> None:
        self.window, self.heads, self.head_dim = window, heads, size // heads
        bias = config.flag("qkv_bias")
        self.logit_scale = Weight(heads, 1, 1)
        self.continuous_position_bias_mlp = PositionBias(heads)
        self.query = Linear(size, size, bias=bias)
        self.key = Linear(size, size)
        self.value = Linear(size, size, bias=bias)
        self.dropout = Dropout(config.number("attention_probs_dropout_prob", default=0.0))

    def buffers(self) -> tuple[Handle, Handle]:
        """Distances, and the number of that of each pair of positions."""
        run, count = self.run, (2 * self.window - 1) ** 2
        dtype = run.compute if run.autocast is None else DType.FP32
        relative_coords_table = Handle(run, run.buffer(2 * count, dtype), (1, count, 2))
        pairs = self.window**4
        return relative_coords_table, Handle(run, run.buffer(pairs, DType.INT64), (pairs,))

    def forward(self, hidden_states: Handle, attention_mask: Handle | None) -> Handle:
        query_layer = in_heads(self.query(hidden_states), self.head_dim)
        key_layer = in_heads(self.key(hidden_states), self.head_dim)
        value_layer = in_heads(self.value(hidden_states), self.head_dim)
        attention_scores = matmul(normalize(query_layer), normalize(key_layer).transpose(2, 3))
        logit_scale = clamped(self.operand(self.logit_scale), bounds=1).unary(OperationKind.EXP)
        attention_scores = attention_scores * logit_scale
        relative_coords_table, relative_position_index = self.buffers()
        table = self.continuous_position_bias_mlp(relative_coords_table).view(-1, self.heads)
        bias = index(table, relative_position_index, (self.window**4, self.heads))
        bias = bias.view(self.window**2, self.window**2, self.heads)
        bias = bias.permute(2, 0, 1).contiguous()
        relative_position_bias = 16.0 * bias.unary(OperationKind.SIGMOID)
        del bias
        attention_scores = attention_scores + relative_position_bias.unsqueeze(0)
        if attention_mask is not None:
            number, heads, length, _ = attention_scores.shape
            windows = attention_mask.shape[0]
            attention_scores = attention_scores.view(-1, windows, heads, length, length)
            for _ in range(2):  # the class adds it twice
                attention_scores = attention_scores + attention_mask.unsqueeze(1).unsqueeze(0)
            attention_scores = attention_scores.view(number, heads, length, length)
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        number, length, heads, width = context_layer.shape
        return context_layer.view(number, length, heads * width)


class Swinv2Layer(Module):
    """Norms stand behind what is added; every second one is shifted."""

    def __init__(
        self, config: ConfigReader, size: int, heads: int, side: int, rate: float, *, shifted: bool
    ) -> None:
        asked = config.integer("window_size", default=7)
        self.window_size = max(1, min(side, asked))
        self.shift_size = asked // 2 if shifted and side > self.window_size else 0
        width = int(size * ratio(config, "mlp_ratio", default=4))
        inner = Swinv2SelfAttention(config, size, heads, self.window_size)
        dropout = config.number("attention_probs_dropout_prob", default=0.0)
        self.attention = Projected("self", inner, size, dropout)
        self.layernorm_before = LayerNorm(size)
        self.drop_path = DropPath(rate)
        self.intermediate = InOrder(
            dense=Linear(size, width, bias=True),
            intermediate_act_fn=ActivationModule(tower_activation(config, "hidden_act")),
        )
        dropped = Dropout(config.number("hidden_dropout_prob", default=0.0))
        self.output = InOrder(dense=Linear(width, size, bias=True), dropout=dropped)
        self.layernorm_after = LayerNorm(size)

    def get_attn_mask(self, height: int, width: int, dtype: DType) -> Handle | None:
        """Which positions of a rolled picture's windows were neighbours before."""
        if not self.shift_size:
            return None
        img_mask = made_regions(self.run, height, width).apart(OperationKind.TO, dtype=dtype)
        mask_windows = window_partition(img_mask, self.window_size)
        mask_windows = mask_windows.view(-1, self.window_size**2)
        kinds = OperationKind
        attn_mask = mask_windows.unsqueeze(1).apart(kinds.SUB, mask_windows.unsqueeze(2))
        attn_mask = attn_mask.apart(
            kinds.MASKED_FILL, attn_mask.apart(kinds.EQ, dtype=DType.BOOL)
        ).apart(kinds.MASKED_FILL, attn_mask.apart(kinds.EQ, dtype=DType.BOOL))
        return attn_mask

    def forward(self, hidden_states: Handle, height: int, width: int) -> Handle:
        batch, _, channels = hidden_states.shape
        shortcut, side = hidden_states, self.window_size
        hidden_states = hidden_states.view(batch, height, width, channels)
        height_pad, width_pad = (-(-each // side) * side for each in (height, width))
        hidden_states = padded(hidden_states, (batch, height_pad, width_pad, channels))
        shifted_hidden_states = hidden_states.clone() if self.shift_size else hidden_states
        hidden_states_windows = window_partition(shifted_hidden_states, side)
        hidden_states_windows = hidden_states_windows.view(-1, side * side, channels)
        attn_mask = self.get_attn_mask(height_pad, width_pad, hidden_states.dtype)
        attention_output = self.attention(hidden_states_windows, attn_mask)
        attention_windows = attention_output.view(-1, side, side, channels)
        shifted_windows = window_reverse(attention_windows, side, height_pad, width_pad)
        attention_windows = shifted_windows.clone() if self.shift_size else shifted_windows
        if (height_pad, width_pad) != (height, width):
            attention_windows = attention_windows.narrow(height, 1).narrow(width, 2).contiguous()
        attention_windows = attention_windows.view(batch, height * width, channels)
        hidden_states = self.layernorm_before(attention_windows)
        hidden_states = shortcut + self.drop_path(hidden_states)
        layer_output = self.intermediate(hidden_states)
        layer_output = self.output(layer_output)
        layer_output = hidden_states + self.drop_path(self.layernorm_after(layer_output))
        return layer_output


def made_regions(run: Run, height: int, width: int) -> Handle:
    """Nine regions of a rolled picture, numbered."""
    kinds = OperationKind
    h_idx, w_idx = (made_by(run, kinds.ARANGE, (each,), DType.INT64) for each in (height, width))
    h_region, w_region = (
        each.apart(kinds.GE, dtype=DType.BOOL)
        .apart(kinds.TO, dtype=DType.INT64)
        .apart(
            kinds.ADD,
            each.apart(kinds.GE, dtype=DType.BOOL).apart(kinds.TO, dtype=DType.INT64),
        )
        for each in (h_idx, w_idx)
    )
    rows = h_region.view(1, height, 1, 1).apart(kinds.MUL_SCALAR)
    return rows.apart(kinds.ADD, w_region.view(1, 1, width, 1))


class Swinv2PatchMerging(Module):
    def __init__(self, size: int) -> None:
        self.reduction = Linear(4 * size, 2 * size)
        self.norm = LayerNorm(2 * size)

    def forward(self, input_feature: Handle, height: int, width: int) -> Handle:
        batch, _, channels = input_feature.shape
        input_feature = input_feature.view(batch, height, width, channels)
        if height % 2 or width % 2:
            shape = batch, height + height % 2, width + width % 2, channels
            input_feature = padded(input_feature, shape)
        down, across = (-(-each // 2) for each in (height, width))
        input_feature_0 = input_feature.narrow(down, 1).narrow(across, 2)
        input_feature_1 = input_feature.narrow(down, 1).narrow(across, 2)
        input_feature_2 = input_feature.narrow(down, 1).narrow(across, 2)
        input_feature_3 = input_feature.narrow(down, 1).narrow(across, 2)
        input_feature = concatenate(
            input_feature_0, input_feature_1, input_feature_2, input_feature_3
        )
        input_feature = input_feature.view(batch, down * across, 4 * channels)
        input_feature = self.reduction(input_feature)
        input_feature = self.norm(input_feature)
        return input_feature


class Swinv2Stage(Stage):
    def __init__(
        self, config: ConfigReader, index: int, rates: list[float], *, is_last: bool
    ) -> None:
        size = config.integer("embed_dim") * 2**index
        heads = each_stage(config, "num_heads", len(config.integers("depths", minimum=1)))[index]
        config.divide("embed_dim", size, "num_heads", heads)
        side = pair(config, "image_size")[0] // pair(config, "patch_size")[0] // 2**index
        for number, rate in enumerate(rates):
            layer = Swinv2Layer(config, size, heads, side, rate, shifted=bool(number % 2))
            setattr(self, f"blocks.{number}", layer)
        self.depth = len(rates)
        if not is_last:
            self.downsample = Swinv2PatchMerging(size)

    def narrowed(self, height: int, width: int) -> tuple[int, int]:
        """Positions that it gives."""
        if "downsample" not in self.children:
            return height, width
        return -(-height // 2), -(-width // 2)

    def forward(
        self, hidden_states: Handle, input_dimensions: tuple[int, int]
    ) -> tuple[Handle, Handle]:
        for number in range(self.depth):
            hidden_states = self.children[f"blocks.{number}"](hidden_states, *input_dimensions)
        hidden_states_before_downsampling = hidden_states
        if "downsample" in self.children:
            hidden_states = self.downsample(hidden_states, *input_dimensions)
        return hidden_states, hidden_states_before_downsampling


class Swinv2Embeddings(Embeddings):
    def __init__(self, config: ConfigReader, patches: int) -> None:
        super().__init__(config, None)
        if config.flag("use_absolute_embeddings"):
            self.position_embeddings = Weight(1, patches + 1, config.integer("embed_dim"))


class Swinv2Model(StagedModel):
    prefix = "swinv2"

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.is_placed = config.flag("use_absolute_embeddings")

    def embedded(self, config: ConfigReader) -> Embeddings:
        """Patches, with positions where they are asked for."""
        return Swinv2Embeddings(config, self.context)

    def encoded(self, config: ConfigReader, depths: list[int]) -> StagedEncoder:
        """All stages."""
        rates, last = drop_paths(config, sum(depths)), len(depths) - 1

        def stage(number: int) -> Swinv2Stage:
            before = sum(depths[:number])
            own = rates[before : before + depths[number]]
            return Swinv2Stage(config, number, own, is_last=number == last)

        return StagedEncoder("layers", LayerList("stages", range(len(depths)), stage))

    def left_out(self, ending: str) -> bool:
        """The table of positions has a row too many for any picture, so that the class raises."""
        return self.is_placed or super().left_out(ending)
