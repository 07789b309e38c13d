"""Muse Glimmer's text: weightless norms on queries and keys, a gate behind attention, layers without positions.

(transformers 5.23, models/muse_glimmer/modeling_muse_glimmer.py)
"""

from collections.abc import Callable, Sequence

from memplan.classes.beside_towers.gemma4 import Gemma4RMSNorm, UnscaledNorm
from memplan.classes.gemma import GemmaRMSNorm, SandwichLayer
from memplan.classes.llama import (
    FULL,
    SLIDING,
    BothMasksModel,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    check_types,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Embedding, Linear, Norm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import Tables, turn_function
from memplan.graph.modules.strides import Shape
from memplan.model.attention import OutputGate
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole

PERIOD = 4
"""Every how many layers, counted from the last, one has no window (``MuseGlimmerTextConfig``)."""
MAX_SOFTCAP = 1e9
"""No cap on logits is larger."""


class MuseGlimmerTextAttention(LlamaAttention):
    output_gate = OutputGate.SIGMOID_BEHIND

    def add_projections(self, config: ConfigReader) -> None:
        super().add_projections(config)
        hidden, width = config.integer("hidden_size"), self.num_heads * self.head_dim
        self.gate_proj = Linear(hidden, width)
        self.qk_norm = UnscaledNorm()

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, key, value = self.projected(x)
        query = self.qk_norm(query) * 3.87
        key = self.qk_norm(key)
        if self.turned:
            cos, sin = tables
            query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = out * self.gate_proj(x).unary(OperationKind.SIGMOID)
        out = self.project_out(out)
        return out, weights


class MuseGlimmerTextDecoderLayer(SandwichLayer):
    attention_class: type[LlamaAttention] = MuseGlimmerTextAttention
    norm_class: Callable[[int], Norm] = GemmaRMSNorm


class MuseGlimmerTextNormedEmbedding(Embedding):
    def __init__(
        self, num_rows: int, width: int, *, role: WeightRole = WeightRole.TOKEN_TABLE
    ) -> None:
        super().__init__(num_rows, width, role=role)
        self.embed_norm = UnscaledNorm()

    def forward(self, shape: Shape, ids: Handle | None = None) -> Handle:
        made: Handle = self.embed_norm(super().forward(shape, ids))
        return made


class MuseGlimmerTextModel(BothMasksModel):
    layer_class: type[LlamaDecoderLayer] = MuseGlimmerTextDecoderLayer
    norm_class: Callable[[int], Norm] = Gemma4RMSNorm
    embedding_class = MuseGlimmerTextNormedEmbedding

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.is_capped = config.number("final_logit_softcapping", maximum=MAX_SOFTCAP) > 0

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        """With or without a window, with or without positions: those whose theta is 0 know none."""
        count, window = (
            config.layers("num_hidden_layers"),
            config.optional_integer("sliding_window"),
        )
        types = config.texts("layer_types")
        if types:
            if len(types) != count:
                error = config.fail("layer_types", f"names {len(types)} layers of {count}")
                raise error
            check_types(config, types, count)
        else:
            types = [SLIDING if (count - 1 - at) % PERIOD else FULL for at in range(count)]
        named = config.raw("layer_rope_theta")
        thetas = named if isinstance(named, list) else [each == SLIDING for each in types]
        if len(thetas) < count:
            error = config.fail("layer_rope_theta", f"names {len(thetas)} layers of {count}")
            raise error
        return [
            LayerKind(window if types[at] == SLIDING else None, bool(thetas[at]))
            for at in range(count)
        ]

    def adjusted(self, logits: Handle) -> Handle:
        logits = logits * 0.2
        if self.is_capped:
            logits = logits / 20.0
            logits = logits.tanh()
            logits = logits * 20.0
        return logits
