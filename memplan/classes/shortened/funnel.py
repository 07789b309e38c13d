"""Funnel Transformer: blocks of layers, each on half the tokens of the one before, and a decoder on all.

(transformers 5.23: models/funnel)
"""

from functools import partial
from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, Encoded, Encoder, EncoderLayer, first_token
from memplan.classes.encoders.bert import ElectraForPreTraining
from memplan.classes.encoders.tables import token_rows, zero_ids
from memplan.classes.encoders.tasks import (
    EncodedStates,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    QuestionAnswering,
    SequenceClassification,
    Tasks,
    TokenClassification,
)
from memplan.classes.llama import Network
from memplan.classes.sounds.base import begin
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind as Kinds
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import (
    activated,
    made_from,
    multiply_in_place,
    padded,
    softmax,
)
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList, numbered
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.units import ceil_div


class FunnelEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden, rows = config.integer("d_model"), config.integer("vocab_size")
        self.word_embeddings = Embedding(rows, hidden, role=WeightRole.TOKEN_TABLE)
        self.layer_norm = LayerNorm(hidden)
        self.dropout = Dropout(config.number("hidden_dropout"))

    def forward(self, batch: int, length: int) -> Handle:
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        embeddings = self.layer_norm(inputs_embeds)
        embeddings = self.dropout(embeddings)
        return embeddings


@dataclass(slots=True)
class AttentionInputs:
    """What all layers of a block are handed beside the states."""

    position_embeds: list[tuple[Handle, ...]]
    token_type_mat: Handle
    attention_mask: Handle
    cls_mask: Handle | None


class FunnelAttentionStructure(Module):
    """Positions, segments and masks, and how they are pooled."""

    def __init__(self, config: ConfigReader) -> None:
        self.blocks = len(config.integers("block_sizes"))
        self.keeps_first = config.flag("separate_cls")
        self.truncates = config.flag("truncate_seq")
        self.queries_alone = config.flag("pool_q_only")
        kind = config.text("pooling_type", default="mean")
        self.pooling = config.choice("pooling_type", kind, ("mean", "max"))
        kind = config.text("attention_type", default="relative_shift")
        kinds = "relative_shift", "factorized"
        self.factorized = config.choice("attention_type", kind, kinds) == "factorized"
        self.sin_dropout = Dropout(config.number("hidden_dropout"))
        self.cos_dropout = Dropout(config.number("hidden_dropout"))

    def init_attention_inputs(
        self, inputs_embeds: Handle, mask: Handle, token_type_ids: Handle
    ) -> AttentionInputs:
        """Of the encoder's, or the decoder's, first layer."""
        position_embeds = self.get_position_embeds(inputs_embeds)
        token_type_mat = self.token_type_ids_to_mat(token_type_ids)
        cls_mask, length, dtype = None, inputs_embeds.shape[1], inputs_embeds.dtype
        if self.keeps_first:
            ones = made_by(self.run, Kinds.ONES, (length - 1, length - 1), dtype)
            cls_mask = (
                ones.apart(Kinds.PAD, shape=(length, length))
                if length == 1
                else made_from(Kinds.PAD, (length, length), dtype, ones)
            )
        return AttentionInputs(position_embeds, token_type_mat, mask, cls_mask)

    def token_type_ids_to_mat(self, token_type_ids: Handle) -> Handle:
        batch, length = token_type_ids.shape
        pairs = batch, length, length
        token_type_mat = made_from(Kinds.EQ, pairs, DType.BOOL, token_type_ids)
        cls_ids = token_type_ids.apart(Kinds.EQ, dtype=DType.BOOL)
        cls_mat = made_from(Kinds.BITWISE_AND, pairs, DType.BOOL, cls_ids)
        return cls_mat & token_type_mat

    def get_position_embeds(self, inputs_embeds: Handle) -> list[tuple[Handle, ...]]:
        """Of all blocks; factorized, four matrices for all of them."""
        _, length, width = inputs_embeds.shape
        rows = length if self.factorized else 4 * length
        sinusoid = made_by(self.run, Kinds.MUL, (rows, width // 2), inputs_embeds.dtype)
        sin, cos = sinusoid.apart(Kinds.SIN), sinusoid.apart(Kinds.COS)
        sin_embed, cos_embed = self.sin_dropout(sin), self.cos_dropout(cos)
        if self.factorized:
            phi, psi = concatenate(sin_embed, sin_embed), concatenate(cos, sin)
            pi, omega = concatenate(cos_embed, cos_embed), concatenate(sin.apart(Kinds.NEG), cos)
            return [(phi, pi, psi, omega)]
        del sin, cos
        pos_embed = concatenate(sin_embed, cos_embed)
        made = []
        for pair in self.spans(length):
            found = [
                made_from(Kinds.GATHER, (count, width), pos_embed.dtype, pos_embed)
                for count in pair
            ]
            made.append((found[-1], *found[:-1]))
        return made

    def spans(self, length: int) -> list[tuple[int, ...]]:
        """Distances of each block's tokens from those of the block before, and from one another."""
        places = list(range(length))
        found: list[tuple[int, ...]] = [(span(places, places, stride=1, shift=1),)]
        for number in range(1, self.blocks):
            pooled = self.stride_pool_pos(places, number)
            before = span(places, pooled, stride=2 ** (number - 1), shift=2)
            places = pooled
            found.append((before, span(places, places, stride=2**number, shift=1)))
        return found

    def stride_pool_pos(self, places: list[int], number: int) -> list[int]:
        if not self.keeps_first:
            return places[::2]
        rest = places[1:-1] if self.truncates else places[1:]
        return [1 - 2**number, *rest[::2]]

    def stride_pool(self, x: Handle, *axes: int) -> Handle:
        """Every other place of dimensions: a view of what the first is joined to."""
        for axis in axes:
            if self.keeps_first:
                x = concatenate(x.narrow(1, axis), x, dim=axis)
            left = x.shape[axis] - (self.keeps_first and self.truncates)
            x = x.narrow(ceil_div(left, 2), axis)
        return x

    def pool_tensor(self, x: Handle) -> Handle:
        """Every two tokens become one; the first stays alone."""
        if self.keeps_first:
            suffix = x.narrow(x.shape[1] - 1, 1) if self.truncates else x
            x = concatenate(x.narrow(1, 1), suffix, dim=1)
        made = empty(self.run, (x.shape[0], ceil_div(x.shape[1], 2), *x.shape[2:]), x.dtype)
        outputs, saves = [made.record], [x.record]
        if self.pooling == "max":
            outputs.append(self.run.tensor(made.numel, DType.INT64))
            saves.append(outputs[-1])
        self.run.record(
            Kinds.AVERAGE_POOL, (x.record,), outputs, saves=saves, gradients=(Gradient.FRESH,)
        )
        return x.leads_to(made, in_rows(x.shape))

    def least_of_mask(self, mask: Handle) -> Handle:
        """``pool_tensor(mask, mode="min")``."""
        return self.pool_tensor(mask.apart(Kinds.NEG)).apart(Kinds.NEG)

    def pre_attention_pooling(self, x: Handle, inputs: AttentionInputs) -> Handle:
        alone = self.queries_alone
        if self.factorized:
            ((phi, pi, *rest),) = inputs.position_embeds
            phi, pi = self.stride_pool(phi, 0), self.stride_pool(pi, 0)
            if not alone:
                rest = [self.stride_pool(each, 0) for each in rest]
            inputs.position_embeds = [(phi, pi, *rest)]
        axes = (1,) if alone else (1, 2)
        inputs.token_type_mat = self.stride_pool(inputs.token_type_mat, *axes)
        if inputs.cls_mask is not None:
            inputs.cls_mask = self.stride_pool(inputs.cls_mask, *(each - 1 for each in axes))
        if not alone:
            inputs.attention_mask = self.least_of_mask(inputs.attention_mask)
        return self.pool_tensor(x)

    def post_attention_pooling(self, inputs: AttentionInputs) -> None:
        if not self.queries_alone:
            return
        if self.factorized:
            ((phi, pi, *rest),) = inputs.position_embeds
            rest = [self.stride_pool(each, 0) for each in rest]
            inputs.position_embeds = [(phi, pi, *rest)]
        inputs.token_type_mat = self.stride_pool(inputs.token_type_mat, 2)
        if inputs.cls_mask is not None:
            inputs.cls_mask = self.stride_pool(inputs.cls_mask, 1)
        inputs.attention_mask = self.least_of_mask(inputs.attention_mask)


def span(places: list[int], pooled: list[int], *, stride: int, shift: int) -> int:
    """How many distances there are."""
    farthest = pooled[0] - places[0] + shift * len(pooled) * stride
    nearest = pooled[0] - places[-1]
    return ceil_div(farthest - (nearest - 1), stride)


def where(mask: Handle, one: Handle, other: Handle) -> Handle:
    """``torch.where`` of what is spread to the mask: keeps that."""
    made = empty(mask.run, mask.shape, one.dtype)
    whole = made.record.storage.num_bytes
    mask.run.record(
        Kinds.WHERE, (mask.record, one.record, other.record), (made.record,), saves=(mask.record,),
        gradients=(Gradient.NONE, whole, whole),
    )  # fmt: skip
    return made


class FunnelRelMultiheadAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, block_index: int) -> None:
        hidden, self.block_index = config.integer("d_model"), block_index
        heads, head_dim = self.num_heads, self.head_dim = (
            config.integer("n_head"), config.integer("d_head"),
        )  # fmt: skip
        self.hidden_dropout = Dropout(config.number("hidden_dropout"))
        self.attention_dropout = Dropout(config.number("attention_dropout"))
        role, width = WeightRole.QUERY_KEY, heads * head_dim
        self.q_head = Linear(hidden, width, role=role)
        self.k_head = Linear(hidden, width, bias=True, role=role)
        self.v_head = Linear(hidden, width, bias=True)
        for name in ("r_w_bias", "r_r_bias"):
            setattr(self, name, Weight(heads, head_dim, role=WeightRole.OTHER))
        self.r_kernel = Weight(hidden, heads, head_dim)
        self.r_s_bias = Weight(heads, head_dim, role=WeightRole.OTHER)
        self.seg_embed = Weight(2, heads, head_dim)
        self.post_proj = Linear(width, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)
        self.layer_norm = LayerNorm(hidden)

    def facts(self) -> AttentionSpec:
        """Of attention to all tokens."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            causal=False, dropout=self.attention_dropout.probability,
        )  # fmt: skip

    def scaled(self, name: str) -> Handle:
        """A bias of the heads, times their scale."""
        return self.operand(self.weights[name]) * self.head_dim**-0.5

    def relative_positional_attention(
        self, inputs: AttentionInputs, q_head: Handle, context_len: int
    ) -> Handle:
        v = self.scaled("r_r_bias")
        w_r = self.operand(self.r_kernel)
        if len(inputs.position_embeds[0]) > 2:
            positional_attn = self.factorized(inputs.position_embeds[0], q_head + v, w_r)
        else:
            shift = 2 if q_head.shape[1] != context_len else 1
            r = inputs.position_embeds[self.block_index][shift - 1]
            r_head = einsum("td,dnh->tnh", r, w_r)
            positional_attn = einsum("binh,tnh->bnit", q_head + v, r_head)
            positional_attn = relative_shift_gather(positional_attn, context_len, shift)
        if inputs.cls_mask is not None:
            positional_attn = multiply_in_place(positional_attn, inputs.cls_mask)
        return positional_attn

    def factorized(self, embeds: tuple[Handle, ...], biased: Handle, w_r: Handle) -> Handle:
        phi, pi, psi, omega = embeds
        q_r_attention = einsum("binh,dnh->bind", biased, w_r)
        q_r_attention_1 = q_r_attention * phi.unsqueeze(1)
        q_r_attention_2 = q_r_attention * pi.unsqueeze(1)
        return einsum("bind,jd->bnij", q_r_attention_1, psi) + einsum(
            "bind,jd->bnij", q_r_attention_2, omega
        )

    def relative_token_type_attention(self, inputs: AttentionInputs, q_head: Handle) -> Handle:
        mat = inputs.token_type_mat
        batch, length, context_len = mat.shape
        r_s_bias = self.scaled("r_s_bias")
        token_type_bias = einsum("bind,snd->bnis", q_head + r_s_bias, self.operand(self.seg_embed))
        pairs = batch, self.num_heads, length, context_len
        spread = Handle(self.run, mat.record, pairs)
        diff_token_type, same_token_type = token_type_bias.split(1, 1)
        token_type_attn = where(spread, same_token_type, diff_token_type)
        if inputs.cls_mask is not None:
            token_type_attn = multiply_in_place(token_type_attn, inputs.cls_mask)
        return token_type_attn

    def forward(self, query: Handle, key: Handle, inputs: AttentionInputs) -> Handle:
        (batch, length, _), context_len = query.shape, key.shape[1]
        heads = self.num_heads, self.head_dim
        q_head = self.q_head(query).view(batch, length, *heads)
        k_head = self.k_head(key).view(batch, context_len, *heads)
        v_head = self.v_head(key).view(batch, context_len, *heads)
        q_head = q_head * self.head_dim**-0.5
        r_w_bias = self.scaled("r_w_bias")
        content_score = einsum("bind,bjnd->bnij", q_head + r_w_bias, k_head)
        positional_attn = self.relative_positional_attention(inputs, q_head, context_len)
        token_type_attn = self.relative_token_type_attention(inputs, q_head)
        attn_score = content_score + positional_attn + token_type_attn
        dtype = attn_score.dtype
        attn_score = attn_score.float()
        attn_score = attn_score - masked(inputs.attention_mask)
        attn_prob = softmax(attn_score.to(dtype), in_own_dtype=True)
        attn_prob = self.attention_dropout(attn_prob)
        attn_vec = einsum("bnij,bjnd->bind", attn_prob, v_head)
        attn_out = self.post_proj(attn_vec.reshape(batch, length, -1))
        attn_out = self.hidden_dropout(attn_out)
        output = self.layer_norm(query + attn_out)
        return output


def masked(attention_mask: Handle) -> Handle:
    """``INF * (1 - attention_mask[:, None, None].float())``."""
    mask = attention_mask.unsqueeze(1).unsqueeze(1)
    return mask.float().apart(Kinds.SUB).apart(Kinds.MUL_SCALAR)


def relative_shift_gather(x: Handle, context_len: int, shift: int) -> Handle:
    """Each pair's own distance: views but for what ``reshape`` has to copy."""
    batch, heads, length, distances = x.shape
    x = x.reshape(batch, heads, distances, length)
    x = x.narrow(distances - shift, 2)
    x = x.reshape(batch, heads, length, distances - shift)
    return x.narrow(context_len)


class FunnelPositionwiseFFN(Network):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("d_model"), config.integer("d_inner")
        self.linear_1 = Linear(hidden, inner, bias=True)
        self.activation_function = ActivationModule(read_activation(config, "hidden_act"))
        self.activation_dropout = Dropout(config.number("activation_dropout"))
        self.linear_2 = Linear(inner, hidden, bias=True)
        self.dropout = Dropout(config.number("hidden_dropout"))
        self.layer_norm = LayerNorm(hidden)

    def facts(self) -> FeedForwardSpec:
        """Of a network without a gate."""
        return FeedForwardSpec(
            intermediate_size=self.linear_1.out_features, activation=self.activation_function.kind,
            bias=True, activation_dropout=self.activation_dropout.probability,
        )  # fmt: skip

    def forward(self, hidden: Handle) -> Handle:
        h = self.linear_1(hidden)
        h = self.activation_function(h)
        h = self.activation_dropout(h)
        h = self.linear_2(h)
        h = self.dropout(h)
        return self.layer_norm(hidden + h)


class FunnelLayer(EncoderLayer):
    def __init__(self, config: ConfigReader, block_index: int) -> None:
        self.attention = FunnelRelMultiheadAttention(config, block_index)
        self.ffn = FunnelPositionwiseFFN(config)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.attention.facts(), feed_forward=self.ffn.facts(), norm=LAYER_NORM,
            placement=NormPlacement.POST, dropout=self.ffn.dropout.probability,
        )  # fmt: skip

    def forward(
        self, x: Handle, inputs: AttentionInputs, structure: FunnelAttentionStructure | None = None
    ) -> Handle | tuple[Handle, Handle]:
        """Of a block's first layer the encoder pools before, and behind it what is beside the states."""
        if structure is None:
            made: Handle = self.ffn(self.attention(x, x, inputs))
            return made
        pooled = structure.pre_attention_pooling(x, inputs)
        key = x if structure.queries_alone else pooled
        output = self.ffn(self.attention(pooled, key, inputs))
        structure.post_attention_pooling(inputs)
        return output, pooled


def layer_of(config: ConfigReader, block_index: int, _: object) -> FunnelLayer:
    """One of a block's, which are all alike."""
    return FunnelLayer(config, block_index)


class FunnelEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        sizes, repeats = block_sizes(config)
        self.attention_structure = FunnelAttentionStructure(config)
        self.num_blocks = len(sizes)
        for index, (size, times) in enumerate(zip(sizes, repeats, strict=True)):
            kinds = [place for place in range(size) for _ in range(times)]
            make = partial(layer_of, config, index)
            made = LayerList("encoder.layers", kinds, make, shared=times > 1)
            setattr(self, f"blocks.{index}", made)

    def forward(self, hidden: Handle, inputs: AttentionInputs) -> list[Handle]:
        """All hidden states."""
        structure, all_hidden_states = self.attention_structure, [hidden]
        for block_index in range(self.num_blocks):
            block = self.children[f"blocks.{block_index}"]
            pooling_flag = hidden.shape[1] > 1 + structure.keeps_first and block_index > 0
            assert isinstance(block, LayerList)
            for layer in block:
                if pooling_flag:
                    hidden, _pooled_hidden = layer(hidden, inputs, structure)
                    pooling_flag = False
                else:
                    hidden = layer(hidden, inputs)
                all_hidden_states.append(hidden)
        return all_hidden_states


def block_sizes(config: ConfigReader) -> tuple[list[int], list[int]]:
    """Layers of each block, and how often each of them runs."""
    sizes = config.integers("block_sizes", minimum=1)
    if not sizes:
        error = config.fail("block_sizes", "is empty; name at least one block's number of layers")
        raise error
    repeats = config.integers("block_repeats", minimum=1) or [1] * len(sizes)
    if len(repeats) != len(sizes):
        error = config.fail("block_repeats", f"names {len(repeats)} blocks of {len(sizes)}")
        raise error
    return list(sizes), list(repeats)


class FunnelDecoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.attention_structure = FunnelAttentionStructure(config)
        kinds = list(range(config.integer("num_decoder_layers", minimum=0)))
        self.layers = LayerList("encoder.decoder", kinds, lambda _: FunnelLayer(config, 0))

    def upsample(self, x: Handle, target_len: int) -> Handle:
        """Every token as often as it stands for others, cut to length."""
        structure = self.attention_structure
        stride, first = 2 ** (structure.blocks - 1), structure.keeps_first
        if stride == 1:
            return x
        cls, rest = x.narrow(1, 1), x.narrow(x.shape[1] - 1, 1) if first else x
        batch, length, width = rest.shape
        output = empty(self.run, (batch, length * stride, width), x.dtype)
        self.run.record(
            Kinds.REPEAT_INTERLEAVE, (rest.record,), (output.record,), gradients=(Gradient.FRESH,)
        )
        if not first:
            return output.narrow(target_len, 1)
        if structure.truncates:
            output = padded(output, (batch, length * stride + stride - 1, width))
        output = output.narrow(target_len - 1, 1)
        output = concatenate(cls, output, dim=1)
        return output

    def forward(self, hidden: Handle, inputs: AttentionInputs) -> Handle:
        for layer in self.layers:
            hidden = layer(hidden, inputs)
        return hidden


class FunnelStates(EncodedStates):
    """With its decoder."""

    pooled = False


class FunnelDiscriminatorPredictions(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.dense = Linear(hidden, hidden, bias=True)
        self.dense_prediction = Linear(hidden, 1, bias=True)
        self.activation = read_activation(config, "hidden_act")

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = activated(x, self.activation)
        logits: Handle = self.dense_prediction(x)
        return logits


class FunnelForPreTraining(ElectraForPreTraining):
    head_class = FunnelDiscriminatorPredictions


def output_matrix(config: ConfigReader, task: EncoderTask) -> OutputMatrix:
    """The output matrix, and nothing before it."""
    made = OutputMatrix(task.spec, config.integer("d_model"))
    made.tie(task)
    return made


class FunnelForMaskedLM(MaskedLM):
    named_head = "lm_head", output_matrix


class FunnelClassificationHead(Module):
    def __init__(self, config: ConfigReader, labels: int) -> None:
        hidden = config.integer("d_model")
        self.linear_hidden = Linear(hidden, hidden, bias=True)
        self.dropout = Dropout(config.number("hidden_dropout"))
        self.linear_out = Linear(hidden, labels, bias=True)

    def forward(self, hidden: Handle) -> Handle:
        hidden = self.linear_hidden(hidden)
        hidden = activated(hidden, Activation.TANH)
        hidden = self.dropout(hidden)
        return self.linear_out(hidden)


class FunnelForSequenceClassification(SequenceClassification):
    """Of the first token, without the decoder (``FunnelBaseModel``)."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        self.classifier = FunnelClassificationHead(config, self.spec.num_labels)

    def logits(self, outputs: Encoded) -> Handle:
        made: Handle = self.classifier(first_token(outputs.last_hidden_state))
        return made


class FunnelForMultipleChoice(FunnelForSequenceClassification):
    outputs = 1


class FunnelForTokenClassification(TokenClassification):
    def classifier_dropout(self, config: ConfigReader) -> float:
        return config.number("hidden_dropout")


class FunnelModel(Encoder):
    prefix = "funnel"
    eager_only = True
    recomputes = False
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: FunnelForMaskedLM,
        Task.BASE: FunnelStates,
        Task.SEQUENCE_CLASSIFICATION: FunnelForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: FunnelForTokenClassification,
        Task.QUESTION_ANSWERING: QuestionAnswering,
        Task.MULTIPLE_CHOICE: FunnelForMultipleChoice,
        Task.PRETRAINING: FunnelForPreTraining,
    }

    def __init__(self, config: ConfigReader, *, pooled: bool = False) -> None:
        self.embeddings = FunnelEmbeddings(config)
        self.encoder = FunnelEncoder(config)
        self.decoder = None if pooled else FunnelDecoder(config)
        self.first = sum(block_sizes(config)[0][:1])
        numbered(self)

    def hidden_size(self, config: ConfigReader) -> int:
        return config.integer("d_model")

    def context_length(self, config: ConfigReader) -> int:
        return config.integer("max_position_embeddings", default=512)

    def forward(self, batch: int, length: int) -> Encoded:
        attention_mask = made_by(self.run, Kinds.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length)
        inputs_embeds = self.embeddings(batch, length)
        mask = attention_mask.to(inputs_embeds.dtype)
        encoder, decoder = self.encoder, self.decoder
        structure = encoder.attention_structure
        inputs = structure.init_attention_inputs(inputs_embeds, mask, token_type_ids)
        all_hidden_states = encoder(inputs_embeds, inputs)
        del inputs
        if decoder is None:
            return Encoded(all_hidden_states[-1])
        begin(self, "encoder.upsampled", ModelPart.OTHER, all_hidden_states[-1])
        upsampled_hidden = decoder.upsample(all_hidden_states[-1], length)
        hidden = upsampled_hidden + all_hidden_states[self.first]
        structure = decoder.attention_structure
        inputs = structure.init_attention_inputs(hidden, attention_mask, token_type_ids)
        return Encoded(decoder(hidden, inputs))
