"""XLNet: scores of contents and of relative positions; tokens come before sequences.

(transformers 5.23: models/xlnet)
"""

from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, Encoded, Encoder, EncoderLayer, first_token
from memplan.classes.encoders.tasks import (
    EncodedStates,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    SequenceClassification,
    Tasks,
    TokenClassification,
    nonlinear,
)
from memplan.classes.llama import Network
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import (
    index_select,
    made_from,
    mean_of_tokens,
    softmax,
    spread,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

KINDS = OperationKind
SUMMARIES = "last", "first", "mean", "cls_index"


class XLNetRelativeAttention(Module):
    block = LayerBlock.ATTENTION
    r_r_bias: Weight
    r_s_bias: Weight
    r_w_bias: Weight

    def __init__(self, config: ConfigReader) -> None:
        hidden, heads = config.integer("d_model"), config.integer("n_head")
        self.num_heads = heads
        self.head_dim = config.divide("d_model", hidden, "n_head", heads)
        shape = hidden, heads, self.head_dim
        self.q = Weight(*shape)
        self.k = Weight(*shape)
        self.v = Weight(*shape)
        self.o = Weight(*shape, role=WeightRole.ATTENTION_OUTPUT)
        self.r = Weight(*shape)
        for name in ("r_r_bias", "r_s_bias", "r_w_bias"):
            setattr(self, name, Weight(*shape[1:]))
        self.seg_embed = Weight(2, *shape[1:])
        self.layer_norm = LayerNorm(hidden)
        self.dropout = Dropout(config.number("dropout"))

    def facts(self) -> AttentionSpec:
        """Of attention to all tokens."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            causal=False, dropout=self.dropout.probability,
        )  # fmt: skip

    def rel_shift_bnij(self, x: Handle) -> Handle:
        batch, heads, length, distances = x.shape
        x = x.reshape(batch, heads, distances, length)
        x = x.narrow(distances - 1, dim=2)
        x = x.reshape(batch, heads, length, distances - 1)
        x = index_select(x, length)
        return x

    def rel_attn_core(
        self,
        q_head: Handle,
        k_head_h: Handle,
        v_head_h: Handle,
        k_head_r: Handle,
        attn_mask: Handle | None,
    ) -> Handle:
        ac = einsum("ibnd,jbnd->bnij", q_head + self.operand(self.r_w_bias), k_head_h)
        bd = einsum("ibnd,jbnd->bnij", q_head + self.operand(self.r_r_bias), k_head_r)
        bd = self.rel_shift_bnij(bd)
        attn_score = (ac + bd + 0) * 1.0
        if attn_mask is not None:
            attn_score = attn_score - attn_mask.apart(KINDS.MUL_SCALAR)
        attn_prob = softmax(attn_score)
        attn_prob = self.dropout(attn_prob)
        attn_vec = einsum("bnij,jbnd->ibnd", attn_prob, v_head_h)
        return attn_vec

    def post_attention(self, h: Handle, attn_vec: Handle) -> Handle:
        attn_out = einsum("ibnd,hnd->ibh", attn_vec, self.operand(self.o))
        attn_out = self.dropout(attn_out)
        attn_out = attn_out + h
        output = self.layer_norm(attn_out)
        return output

    def forward(self, h: Handle, r: Handle, attn_mask: Handle | None) -> Handle:
        for each in (self.r_s_bias, self.seg_embed):
            self.parameter(each).unused = True
        q_head_h = einsum("ibh,hnd->ibnd", h, self.operand(self.q))
        k_head_h = einsum("ibh,hnd->ibnd", h, self.operand(self.k))
        v_head_h = einsum("ibh,hnd->ibnd", h, self.operand(self.v))
        r_kernel = self.operand(self.r)
        k_head_r = einsum("ibh,hnd->ibnd", r.to(r_kernel.dtype), r_kernel)
        del r_kernel
        attn_vec = self.rel_attn_core(q_head_h, k_head_h, v_head_h, k_head_r, attn_mask)
        output_h = self.post_attention(h, attn_vec)
        return output_h


class XLNetFeedForward(Network):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("d_model"), config.integer("d_inner")
        self.layer_norm = LayerNorm(hidden)
        self.layer_1 = Linear(hidden, inner, bias=True)
        self.layer_2 = Linear(inner, hidden, bias=True)
        self.dropout = Dropout(config.number("dropout"))
        self.activation_function = ActivationModule(read_activation(config, "ff_activation"))

    def facts(self) -> FeedForwardSpec:
        """Of a network without a gate."""
        return FeedForwardSpec(
            intermediate_size=self.layer_1.out_features, activation=self.activation_function.kind,
            bias=True, activation_dropout=self.dropout.probability,
        )  # fmt: skip

    def forward(self, inp: Handle) -> Handle:
        output = inp
        output = self.layer_1(output)
        output = self.activation_function(output)
        output = self.dropout(output)
        output = self.layer_2(output)
        output = self.dropout(output)
        output = self.layer_norm(output + inp)
        return output


class XLNetLayer(EncoderLayer):
    def __init__(self, config: ConfigReader) -> None:
        self.rel_attn = XLNetRelativeAttention(config)
        self.ff = XLNetFeedForward(config)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.rel_attn.facts(), feed_forward=self.ff.facts(), norm=LAYER_NORM,
            placement=NormPlacement.POST, dropout=self.ff.dropout.probability,
        )  # fmt: skip

    def forward(self, output_h: Handle, r: Handle, attn_mask: Handle | None) -> Handle:
        output_h = self.rel_attn(output_h, r, attn_mask)
        output_h = self.ff(output_h)
        return output_h


class XLNetSequenceSummary(Module):
    """One token of each sequence, or their mean."""

    def __init__(self, config: ConfigReader, width: int) -> None:
        key = "summary_type"
        self.kind = config.choice(key, config.text(key, default="last"), SUMMARIES)
        projects = config.flag("summary_use_proj", default=True)
        self.summary = Linear(config.integer("d_model"), width, bias=True) if projects else None
        named = config.has("summary_activation")
        self.activation = read_activation(config, "summary_activation") if named else None
        self.first_dropout = Dropout(config.number("summary_first_dropout", default=0.0))
        self.last_dropout = Dropout(config.number("summary_last_dropout", default=0.0))

    def forward(self, x: Handle) -> Handle:
        output = mean_of_tokens(x) if self.kind == "mean" else first_token(x)
        output = self.first_dropout(output)
        if self.summary is not None:
            output = self.summary(output)
        if self.activation is not None:
            output = nonlinear(output, self.activation)
        output = self.last_dropout(output)
        return output


class XLNetForSequenceClassification(SequenceClassification):
    def add_head(self, config: ConfigReader) -> None:
        self.sequence_summary = XLNetSequenceSummary(config, self.spec.hidden_size)
        self.logits_proj = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def logits(self, outputs: Encoded) -> Handle:
        output = outputs.last_hidden_state
        output = self.sequence_summary(output)
        return self.logits_proj(output)


class XLNetForMultipleChoice(XLNetForSequenceClassification):
    outputs = 1


class XLNetForTokenClassification(TokenClassification):
    def classifier_dropout(self, config: ConfigReader) -> float:  # noqa: ARG002
        """There is none."""
        return 0.0


def lm_loss(config: ConfigReader, task: EncoderTask) -> OutputMatrix:
    """The output matrix, and nothing before it."""
    made = OutputMatrix(task.spec, config.integer("d_model"))
    made.tie(task)
    return made


class XLNetLMHeadModel(MaskedLM):
    """Its loss is on every token's own logits: nothing is shifted."""

    named_head = "lm_loss", lm_loss


class XLNetModel(Encoder):
    prefix = "transformer"
    eager_only = True
    recomputes = False
    tasks: ClassVar[Tasks] = {
        Task.CAUSAL_LM: XLNetLMHeadModel,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: XLNetForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: XLNetForTokenClassification,
        Task.MULTIPLE_CHOICE: XLNetForMultipleChoice,
    }

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        hidden = config.integer("d_model")
        key = "attn_type"
        self.attn_type = config.choice(key, config.text(key, default="bi"), ("bi", "uni"))
        self.mask_emb = Weight(1, 1, hidden)
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embedding = Embedding(rows, hidden, role=role)
        kinds = [None] * config.layers("n_layer")
        self.layer = LayerList("encoder.layers", kinds, lambda _: XLNetLayer(config))
        self.dropout = Dropout(config.number("dropout"))

    def hidden_size(self, config: ConfigReader) -> int:
        return config.integer("d_model")

    def context_length(self, config: ConfigReader) -> int:
        return config.integer("max_position_embeddings", default=512)

    def positional_embedding(self, length: int, batch: int) -> Handle:
        shape = length, self.word_embedding.width // 2
        sinusoid_inp = made_by(self.run, KINDS.MUL, shape, DType.FP32)
        pos_emb = concatenate(sinusoid_inp.apart(KINDS.SIN), sinusoid_inp.apart(KINDS.COS))
        return spread(pos_emb.unsqueeze(1), (length, batch, self.word_embedding.width))

    def target_mask(self, length: int) -> Handle | None:
        """What tokens do not see, which are those behind them."""
        if self.attn_type == "bi":
            return None
        shape, full = (length, length), self.run.compute
        attn_mask = made_by(self.run, KINDS.ONES, shape, full)
        attn_mask = attn_mask.apart(KINDS.GT, dtype=DType.BOOL).apart(KINDS.TO, dtype=full)
        others = made_from(KINDS.NEG, shape, full, made_by(self.run, KINDS.EYE, shape, full))
        return (
            attn_mask.apart(KINDS.ADD, others)
            .apart(KINDS.GT, dtype=DType.BOOL)
            .apart(KINDS.TO, dtype=full)
        )

    def forward(self, batch: int, length: int) -> Encoded:
        run = self.run
        output_h = self.encoded(batch, length)
        run.start("head", output_h.record, part=ModelPart.HEAD)
        output = self.dropout(output_h)
        output = output.permute(1, 0, 2).contiguous()
        return Encoded(output)

    def encoded(self, batch: int, length: int) -> Handle:
        """What the last layer gives; all else that ``forward`` has names for goes here, one dropout early."""
        run, shape = self.run, (length, batch)
        self.parameter(self.mask_emb).unused = True
        input_ids = made_by(run, KINDS.CLONE, shape, DType.INT64)
        non_tgt_mask = self.target_mask(length)
        word_emb_k = self.word_embedding(shape, input_ids)
        run.embedded(word_emb_k.record, run.parameters[self.word_embedding.weight])
        output_h = self.dropout(word_emb_k)
        pos_emb = self.positional_embedding(2 * length, batch)
        pos_emb = self.dropout(pos_emb)
        for layer_module in self.layer:
            output_h = layer_module(output_h, pos_emb, non_tgt_mask)
        return output_h
