"""Aria: queries that read the patches of Idefics 3's tower, as many as a picture of that size has.

(transformers 5.23, models/aria/modeling_aria.py)
"""

from collections.abc import Mapping

from memplan.classes.compared.clip import PackedAttention
from memplan.classes.joined.base import VISION
from memplan.classes.joined.llava import FeaturesModel
from memplan.errors import SetupError
from memplan.families.nesting import EMPTY, PartSpec, read_part
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear
from memplan.graph.modules.functional import product, repeated
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation

COUNTS: Mapping[int, int] = {1225: 128, 4900: 256}
"""How many queries read so many patches, where a file does not say it (``AriaConfig``)."""


class MaskedMultiheadAttention(PackedAttention):
    """Of keys that are not the values; a mask is added to its scores."""

    def forward(self, query: Handle, key: Handle, value: Handle) -> Handle:
        pairs = query.shape[0] * self.num_heads, query.shape[1], key.shape[1]
        attn_mask = made_by(self.run, OperationKind.MASK, pairs, query.dtype)
        size = query.shape[-1]
        given = [each.transpose(0, 1) for each in (query, key, value)]
        weights = self.operand(self.in_proj_weight).split(size, size, size, dim=0)
        biases = self.operand(self.in_proj_bias).split(size, size, size, dim=0)
        q, k, v = map(self.across, given, weights, biases)
        del weights, biases
        return self.attended(q, k, v, attn_mask)

    def across(self, x: Handle, weight: Handle, bias: Handle) -> Handle:
        """``F.linear`` of what does not lie in rows: a copy, the product, and the bias added in place."""
        cast = self.run.autocast or x.dtype
        x, weight, bias = (each.to(cast) for each in (x, weight, bias))
        made = product(x.contiguous(), weight)
        made += bias
        return made

    def scores(self, q: Handle, k: Handle, *masks: Handle) -> Handle:
        (mask,) = masks
        run, added = self.run, mask.to(self.run.autocast or mask.dtype)
        made = empty(run, mask.shape, q.dtype)
        run.record(
            OperationKind.BADDBMM, (added.record, q.record, k.record), (made.record,),
            saves=(q.record, k.record), gradients=(Gradient.NONE, Gradient.FRESH, Gradient.FRESH),
            flops=2 * made.numel * q.shape[-1],
        )  # fmt: skip
        for each in (q, k):
            each.leads_to(made, in_rows(each.shape))
        return made


class AriaCrossAttention(Module):
    def __init__(self, size: int, heads: int) -> None:
        self.q_proj, self.k_proj, self.v_proj = (Linear(size, size) for _ in range(3))
        self.multihead_attn = MaskedMultiheadAttention(size, heads)
        self.linear = Linear(size, size, bias=True)
        self.layer_norm, self.layer_norm_kv = LayerNorm(size), LayerNorm(size)

    def forward(self, key_value_states: Handle, hidden_states: Handle) -> Handle:
        query = self.q_proj(self.layer_norm(hidden_states))
        key_value_states = self.layer_norm_kv(key_value_states)
        key = self.k_proj(key_value_states)
        value = self.v_proj(key_value_states)
        attn_output = self.multihead_attn(query, key, value)
        attn_output = self.linear(attn_output)
        return attn_output


class AriaProjectorMLP(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        self.linear_in, self.linear_out = Linear(inputs, outputs), Linear(outputs, outputs)
        self.act = ActivationModule(Activation.GELU_NEW)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.act(self.linear_in(hidden_states))
        hidden_states = self.linear_out(hidden_states)
        return hidden_states


class AriaProjector(Module):
    def __init__(self, counts: Mapping[int, int], size: int, heads: int, outputs: int) -> None:
        self.counts = counts
        self.query = Weight(max(counts.values()), size)
        self.cross_attn = AriaCrossAttention(size, heads)
        self.layer_norm = LayerNorm(size)
        self.feed_forward = AriaProjectorMLP(size, outputs)

    def forward(self, key_value_states: Handle) -> Handle:
        batch_size, num_patches, _ = key_value_states.shape
        queries = self.operand(self.query).narrow(self.asked(num_patches), 0)
        queries = repeated(queries.unsqueeze(0), batch_size)
        attention_out = self.cross_attn(key_value_states, queries)
        out: Handle = self.feed_forward(self.layer_norm(attention_out))
        return out

    def asked(self, patches: int) -> int:
        """How many queries read so many patches.

        Raises ``SetupError`` where none do.
        """
        if patches not in self.counts:
            known = ", ".join(map(str, self.counts))
            msg = (
                f"image_size: a picture of {patches} patches has no number of queries in "
                f"projector_patch_to_query_dict, which knows {known}; choose a size of as many patches"
            )
            raise SetupError(msg)
        return self.counts[patches]


class AriaModel(FeaturesModel):
    text = PartSpec(key="text_config")
    tower_kind, fills = "idefics3_vision", EMPTY

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> Module:
        part = read_part(config, PartSpec(key=VISION, model_type=self.tower_kind))
        heads = part.reader.integer("num_attention_heads")
        return AriaProjector(query_counts(config), inputs, heads, outputs)

    def leaves_out(self, config: ConfigReader) -> bool:
        del config
        return False


def query_counts(config: ConfigReader) -> Mapping[int, int]:
    """How many queries read so many patches."""
    found = config.mapping("projector_patch_to_query_dict")
    if not found:
        return COUNTS
    counts = {
        int(patches): queries
        for patches, queries in found.items()
        if patches.isdecimal() and isinstance(queries, int) and queries > 0
    }
    if len(counts) < len(found):
        error = config.fail("projector_patch_to_query_dict", "expected whole numbers above 0")
        raise error
    return counts
