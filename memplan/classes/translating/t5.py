"""T5, mT5 and UMT5: relative position biases, RMS norms, no other biases, a shared token table.

``T5Config`` derives the network from ``feed_forward_proj``, unless the file also says ``dense_act_fn`` and
``is_gated_act``, and always ties the output matrix. Files with ``tie_word_embeddings: false`` (version 1.1,
flan, ByT5, mT5, UMT5) come with checkpoints that hold an output matrix of their own, which transformers 4
trained apart. (transformers 5.23: models/t5, models/mt5, models/umt5)
"""

from math import prod
from typing import ClassVar, NamedTuple

from memplan.classes.translating.stacks import (
    ConditionalGeneration,
    DecodedStates,
    LastTokenClassification,
    Stack,
    StackLayer,
    Tasks,
    TwoStacks,
    clamped,
    projected_heads,
)
from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.families.llama import named_activation
from memplan.families.request import ReadRequest
from memplan.fast_dataclass import replace
from memplan.graph.attention.position_bias import bucket_temporaries
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import (
    Attended,
    biased_attention,
    fused_attention,
    sdpa_attention,
)
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, Linear, RMSNorm
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask
from memplan.graph.modules.module import Module
from memplan.graph.operations.lookups import embedding_lookup
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import EmbeddingSpec, LayerSpec
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.model.spec import Tying
from memplan.training.choices_of_kernels.kernels import AttentionKernel

T5_NORM = NormSpec(kind=NormKind.RMS_T5)
"""What others read of ``T5LayerNorm``."""


class T5LayerNorm(RMSNorm):
    """The variance of an fp32 copy; x itself is scaled, then cast to a 16-bit weight's dtype."""

    kind = NormKind.RMS_T5

    def forward(self, x: Handle) -> Handle:
        x = self.behind_hook(x)
        variance = x.float().pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        weight = self.parameter(self.weight)
        if weight.dtype.is_half:
            x = x.to(weight.dtype)
        return x.like(self.run.mul(weight, x.record))


class DenseActDense(Module):
    """``T5DenseActDense``, and ``T5DenseGatedActDense`` where the config asks for a gate."""

    reads_gated = True
    """With a gate too it asks for the last matrix' format before it calls that (``self.wo.weight.dtype``)."""

    def __init__(self, config: ConfigReader) -> None:
        spec = read_network(config)
        hidden, inner = config.integer("d_model"), spec.intermediate_size
        self.spec = spec
        if spec.gated:
            self.wi_0, self.wi_1 = Linear(hidden, inner), Linear(hidden, inner)
        else:
            self.wi = Linear(hidden, inner)
        self.wo = Linear(inner, hidden)
        self.dropout = Dropout(config.number("dropout_rate"))
        self.act = ActivationModule(spec.activation)

    def forward(self, x: Handle) -> Handle:
        if self.spec.gated:
            return self.gated(x)
        x = self.wi(x)
        x = self.act(x)
        x = self.dropout(x)
        self.read_apart(self.wo, called=True)
        x = x.to(self.run.compute)
        x = self.wo(x)
        return x

    def gated(self, x: Handle) -> Handle:
        hidden_gelu = self.act(self.wi_0(x))
        hidden_linear = self.wi_1(x)
        x = hidden_gelu * hidden_linear
        x = self.dropout(x)
        if self.reads_gated:
            self.read_apart(self.wo, called=True)
        x = x.to(self.run.compute)
        x = self.wo(x)
        return x


def read_network(config: ConfigReader) -> FeedForwardSpec:
    """``relu``, ``gated-gelu`` (with the tanh form) or any other ``[gated-]activation``."""
    key = "feed_forward_proj"
    projection = config.text(key, default="relu")
    gate, _, name = projection.rpartition("-")
    if gate not in ("", "gated"):
        error = config.fail(key, f"expected 'relu' or 'gated-gelu', got {projection!r}")
        raise error
    if projection == "gated-gelu":
        name = Activation.GELU_NEW.value
    return FeedForwardSpec(
        intermediate_size=config.integer("d_ff"),
        activation=named_activation(config, key, config.text("dense_act_fn", default=name)),
        gated=config.flag("is_gated_act", default=gate == "gated"),
    )


class T5LayerFF(Module):
    network_class: type[DenseActDense] = DenseActDense

    def __init__(self, config: ConfigReader) -> None:
        self.DenseReluDense = self.network_class(config)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(self, x: Handle) -> Handle:
        forwarded_states = self.layer_norm(x)
        forwarded_states = self.DenseReluDense(forwarded_states)
        x = x + self.dropout(forwarded_states)
        return x


class RelativeBias(Embedding):
    """A number for each bucket of distances and each head."""

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        """Looked up with heads last, so that its gradient comes the other way round and is copied."""
        assert ids is not None
        table = self.parameter(self.weight)
        made = embedding_lookup(self.run, table, prod(shape), ids.record, turned=True)
        return Handle(self.run, made, (*shape, self.width))


class T5Attention(Module):
    """Scores with a bias for every distance; of another stack's states with zeros in their place."""

    block = LayerBlock.ATTENTION
    names_logarithms = False
    """The logarithms of distances have a name of their own."""

    def __init__(
        self, config: ConfigReader, *, causal: bool, biased: bool, cross: bool = False
    ) -> None:
        hidden, width = config.integer("d_model"), config.integer("d_kv")
        self.num_heads, self.head_dim = config.integer("num_heads"), width
        self.causal, self.biased, self.dropout = causal, biased, config.number("dropout_rate")
        if cross:
            self.block = LayerBlock.CROSS_ATTENTION
        inner, role = self.num_heads * width, WeightRole.QUERY_KEY
        self.q = Linear(hidden, inner, role=role)
        self.k = Linear(hidden, inner, role=role)
        self.v = Linear(hidden, inner)
        self.o = Linear(inner, hidden, role=WeightRole.ATTENTION_OUTPUT)
        if biased:
            buckets = config.integer("relative_attention_num_buckets")
            self.relative_attention_bias = RelativeBias(buckets, self.num_heads)

    def facts(self) -> AttentionSpec:
        """What others read of it."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            causal=self.causal, dropout=self.dropout,
        )  # fmt: skip

    def compute_bias(self, query_length: int, key_length: int) -> Handle:
        shape = query_length, key_length
        relative_position = made_by(self.run, OperationKind.SUB, shape, DType.INT64)
        relative_position_bucket = self.bucket(relative_position)
        values = self.relative_attention_bias(shape, relative_position_bucket)
        values = values.permute(2, 0, 1).unsqueeze(0)
        return values

    def bucket(self, relative_position: Handle) -> Handle:
        """``_relative_position_bucket``."""
        run, made = self.run, empty(self.run, relative_position.shape, DType.INT64)
        run.record(
            OperationKind.RELATIVE_POSITION_BUCKET, (relative_position.record,), (made.record,),
            forward_scratch_bytes=bucket_temporaries(
                made.numel, causal=self.causal, named=self.names_logarithms
            ),
        )  # fmt: skip
        return made

    def position_bias(self, query: Handle, key_length: int) -> Handle:
        """That of this layer."""
        if self.biased:
            return self.compute_bias(query.shape[2], key_length)
        shape = 1, self.num_heads, query.shape[2], key_length
        return made_by(self.run, OperationKind.ZEROS, shape, query.dtype)

    def attended(
        self,
        query: Handle,
        key: Handle,
        value: Handle,
        mask: Handle | None,
        position_bias: Handle,
    ) -> Attended:
        """What the attention function makes of it."""
        kernels = self.run.kernels
        if kernels.attention is AttentionKernel.EAGER:
            if kernels.fused_elementwise:
                return fused_attention(query, key, value, mask, self.dropout)
            return biased_attention(query, key, value, mask, position_bias, self.dropout)
        if kernels.attention.is_package:
            msg = "flash attention cannot add a position bias (T5); choose attention sdpa or eager"
            raise UnsupportedOperationError(msg)
        mask = bias_mask(position_bias, causal=self.causal)
        return sdpa_attention(query, key, value, mask, self.dropout, causal=self.causal)


def bias_mask(position_bias: Handle, *, causal: bool) -> Handle:
    """``create_position_bias_mask``: an additive mask, causal where the kernel can no longer be."""
    run, mask = position_bias.run, position_bias
    if causal:
        pattern = made_by(run, OperationKind.GE, position_bias.shape[2:], DType.BOOL)
        made = run.tensor(position_bias.numel, position_bias.dtype)
        run.record(
            OperationKind.WHERE, (pattern.record, position_bias.record), (made,),
            saves=(pattern.record,), gradients=(Gradient.NONE, Gradient.FRESH),
        )  # fmt: skip
        mask = position_bias.like(made)
    return mask.contiguous()


class SharingAttention(T5Attention):
    """T5's: the first layer makes the bias, and the others are given it."""

    def position_bias(self, query: Handle, key_length: int) -> Handle:
        """Under gradient checkpointing the class lets zeros require a gradient, which nothing uses."""
        made = super().position_bias(query, key_length)
        if not self.biased and self.run.options.checkpointed_layers:
            self.run.leaf(made.record)
        return made

    def forward(
        self, x: Handle, mask: Handle | None, memory: Handle | None, bias: Handle | None
    ) -> tuple[Handle, Handle, Handle | None]:
        batch, length, _ = x.shape
        query_states = self.q(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        current_states = x if memory is None else memory
        keys = current_states.shape[1]
        key_states = self.k(current_states).view(batch, keys, -1, self.head_dim).transpose(1, 2)
        value_states = self.v(current_states).view(batch, keys, -1, self.head_dim).transpose(1, 2)
        if bias is None:
            bias = self.position_bias(query_states, keys)
        attn_output, attn_weights = self.attended(
            query_states, key_states, value_states, mask, bias
        )
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.o(attn_output)
        return attn_output, bias, attn_weights


class T5LayerSelfAttention(Module):
    def __init__(self, config: ConfigReader, *, decoder: bool, biased: bool) -> None:
        self.SelfAttention = SharingAttention(config, causal=decoder, biased=biased)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(
        self, x: Handle, mask: Handle | None, bias: Handle | None
    ) -> tuple[Handle, Handle, Handle | None]:
        normed_hidden_states = self.layer_norm(x)
        attention_output, bias, attn_weights = self.SelfAttention(
            normed_hidden_states, mask, None, bias
        )
        attention_output = x + self.dropout(attention_output)
        return attention_output, bias, attn_weights


class T5LayerCrossAttention(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.EncDecAttention = SharingAttention(config, causal=False, biased=False, cross=True)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(
        self, x: Handle, memory: Handle, bias: Handle | None
    ) -> tuple[Handle, Handle, Handle | None]:
        normed_hidden_states = self.layer_norm(x)
        attention_output, bias, attn_weights = self.EncDecAttention(
            normed_hidden_states, None, memory, bias
        )
        layer_output = x + self.dropout(attention_output)
        return layer_output, bias, attn_weights


class Parts(Module):
    """``torch.nn.ModuleList``, whose modules are each called by its number."""

    def __init__(self, *parts: Module) -> None:
        for number, each in enumerate(parts):
            setattr(self, str(number), each)

    def __getitem__(self, number: int) -> Module:
        return list(self.children.values())[number]


class BlockKind(NamedTuple):
    """What sets a layer apart from the others of its stack."""

    biased: bool
    """It has a table of biases."""
    sparse: bool = False
    """Its network is a mixture of experts (Switch Transformers)."""


class BlockParts(StackLayer):
    """Attention, in a decoder that to the encoder's states too, and a network, each a module."""

    def __init__(self, config: ConfigReader, kind: BlockKind, *, decoder: bool) -> None:
        self.dropout_rate = config.number("dropout_rate")
        self.layer = Parts(*self.parts(config, kind, decoder=decoder))

    def parts(self, config: ConfigReader, kind: BlockKind, *, decoder: bool) -> list[Module]:
        """Its modules."""
        found: list[Module] = [T5LayerSelfAttention(config, decoder=decoder, biased=kind.biased)]
        if decoder:
            found.append(T5LayerCrossAttention(config))
        return [*found, self.network(config, kind)]

    def network(self, config: ConfigReader, kind: BlockKind) -> Module:
        """The last of them."""
        del kind
        return T5LayerFF(config)

    def network_facts(self) -> FeedForwardSpec | MixtureSpec:
        """What others read of it."""
        networks = (each for _, each in self.modules() if isinstance(each, DenseActDense))
        return replace(next(networks).spec, activation_dropout=self.dropout_rate)

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        attentions = [each for _, each in self.modules() if isinstance(each, T5Attention)]
        own, *crossing = (each.facts() for each in attentions)
        return LayerSpec(
            attention=own,
            cross_attention=crossing[0] if crossing else None,
            feed_forward=self.network_facts(),
            norm=T5_NORM,
            dropout=self.dropout_rate,
        )


class T5Block(BlockParts):
    hands_on = 2

    def forward(
        self,
        x: Handle,
        mask: Handle | None,
        bias: Handle | None,
        memory: Handle | None,
        cross_bias: Handle | None,
    ) -> tuple[Handle, Handle, Handle | None]:
        memory = None if memory is None else self.behind_hook(memory)
        x, self_attn_position_bias, _ = self.layer[0](x, mask, bias)
        x = clamped(x)
        cross_attn_position_bias = None
        if memory is not None:
            x, cross_attn_position_bias, _ = self.layer[1](x, memory, cross_bias)
            x = clamped(x)
        x = self.layer[-1](x)
        x = clamped(x)
        return x, self_attn_position_bias, cross_attn_position_bias


class StackParts(Stack):
    """A table, blocks, a norm and a dropout."""

    block_class: type[BlockParts] = T5Block

    def __init__(self, config: ConfigReader, name: str, count: int) -> None:
        self.name, hidden = name, config.integer("d_model")
        self.embed_tokens = Embedding(config.integer("vocab_size"), hidden)
        self.children["block"] = LayerList(  # as an attribute it would be what its tensors count as
            f"{name}.layers", self.kinds(config, count),
            lambda kind: self.block_class(config, kind, decoder=name == "decoder"),
        )  # fmt: skip
        self.final_layer_norm = T5LayerNorm(hidden)
        self.final_layer_norm.segment = f"{name}.norm", ModelPart.NORM
        self.dropout = Dropout(config.number("dropout_rate"))

    def kinds(self, config: ConfigReader, count: int) -> list[BlockKind]:
        """The first layer has a table of biases."""
        del config
        return [BlockKind(number == 0) for number in range(count)]

    def embedding_facts(self) -> EmbeddingSpec:
        """What others read of its tables."""
        table, dropout = self.embed_tokens, self.dropout.probability
        return EmbeddingSpec(embedding_size=table.width, dropout=dropout)

    def norm_facts(self) -> NormSpec:
        """The norm behind its layers."""
        return T5_NORM

    def embedded(self, batch: int, length: int, ids: Handle | None) -> Handle:
        """Rows of the table, of which an adapter may want a gradient."""
        run = self.run
        run.enter(self.name)
        made: Handle = self.embed_tokens((batch, length), ids)
        run.embedded(made.record, run.parameters[self.embed_tokens.weight])
        return self.joined(made)


class T5Stack(StackParts):
    def mask(self, batch: int, length: int, memory: Handle | None) -> Handle | None:
        """A decoder's, where the kernel does not know it."""
        return None if memory is None else causal_mask(self.run, batch, length)

    def forward(
        self, batch: int, length: int, ids: Handle | None = None, memory: Handle | None = None
    ) -> Handle:
        inputs_embeds = self.embedded(batch, length, ids)
        attention_mask = self.mask(batch, length, memory)
        position_bias = None
        encoder_decoder_position_bias = None
        x = self.dropout(inputs_embeds)
        for layer_module in self.layer_list:
            x, self_attention_position_bias, cross_attention_position_bias = layer_module(
                x, attention_mask, position_bias, memory, encoder_decoder_position_bias
            )
            position_bias = self_attention_position_bias
            if memory is not None:
                encoder_decoder_position_bias = cross_attention_position_bias
        x = self.final_layer_norm(x)
        x = self.dropout(x)
        self.returned()
        return x


class T5Model(TwoStacks):
    prefix = "transformer"
    wraps = False
    always_tied = True
    context_keys = "n_positions", "max_position_embeddings"
    default_context = 512
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: ConditionalGeneration,
        Task.BASE: DecodedStates,
        Task.SEQUENCE_CLASSIFICATION: LastTokenClassification,
    }
    stack_class: type[StackParts] = T5Stack

    def __init__(self, config: ConfigReader) -> None:
        layers = config.layers("num_layers")
        depth = config.layers("num_decoder_layers", default=layers)
        self.is_untied = not config.flag("tie_word_embeddings", default=True)
        rows, hidden = config.integer("vocab_size"), config.integer("d_model")
        self.add_table(config, Embedding(rows, hidden))
        self.encoder = self.stack_class(config, "encoder", layers)
        self.decoder = self.stack_class(config, "decoder", depth)
        self.share_table()

    @property
    def tying(self) -> Tying:
        """Unclear where the file unties what the class ties."""
        return Tying.AMBIGUOUS if self.is_untied else Tying.CLEAR

    @property
    def scales_output(self) -> bool:
        """Unless the file unties the output matrix."""
        return not self.is_untied

    @staticmethod
    def understood(config: ConfigReader, request: ReadRequest) -> ReadRequest:
        """The request, with the old name ``T5WithLMHeadModel`` understood and half a model refused."""
        names = config.texts("architectures")
        if request.task is None and any(each.endswith("EncoderModel") for each in names):
            problem = (
                "an encoder alone is not supported; for the whole model choose `task='seq2seq-lm'`"
            )
            error = config.fail("architectures", problem)
            raise error
        old = any(each.endswith("WithLMHeadModel") for each in names)
        if old and request.task is Task.CAUSAL_LM:
            return replace(request, task=Task.SEQ2SEQ_LM)
        return request


class MT5Model(T5Model):
    @property
    def scales_output(self) -> bool:
        """Never."""
        return False


# --- UMT5: a table of biases in every layer -----------------------------------------------------------


class OwnAttention(T5Attention):
    """Its bias is its own, made behind the keys and values."""

    names_logarithms = True

    def forward(self, x: Handle, memory: Handle | None, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query_states = self.q(x)
        query_states = query_states.view(batch, length, -1, self.head_dim).transpose(1, 2)
        current_states = x if memory is None else memory
        keys = current_states.shape[1]
        key_states = self.k(current_states)
        key_states = projected_heads(key_states, self.head_dim)
        value_states = self.v(current_states)
        value_states = value_states.view(batch, keys, -1, self.head_dim).transpose(1, 2)
        bias = self.position_bias(query_states, keys)
        attn_output, attn_weights = self.attended(
            query_states, key_states, value_states, mask, bias
        )
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.o(attn_output)
        return attn_output, attn_weights


class UMT5LayerSelfAttention(Module):
    def __init__(self, config: ConfigReader, *, decoder: bool) -> None:
        self.SelfAttention = OwnAttention(config, causal=decoder, biased=True)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        normed_hidden_states = self.layer_norm(x)
        attention_output = self.SelfAttention(normed_hidden_states, None, mask)
        x = x + self.dropout(attention_output[0])
        outputs: Attended = (x, attention_output[1])
        return outputs


class UMT5LayerCrossAttention(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.EncDecAttention = OwnAttention(config, causal=False, biased=False, cross=True)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(self, x: Handle, memory: Handle) -> Attended:
        normed_hidden_states = self.layer_norm(x)
        attention_output = self.EncDecAttention(normed_hidden_states, memory, None)
        layer_output = x + self.dropout(attention_output[0])
        outputs: Attended = (layer_output, attention_output[1])
        return outputs


class UMT5Block(BlockParts):
    def parts(self, config: ConfigReader, kind: BlockKind, *, decoder: bool) -> list[Module]:
        """Its modules."""
        del kind
        found: list[Module] = [UMT5LayerSelfAttention(config, decoder=decoder)]
        if decoder:
            found.append(UMT5LayerCrossAttention(config))
        return [*found, T5LayerFF(config)]

    def forward(self, x: Handle, mask: Handle | None, memory: Handle | None) -> Handle:
        memory = None if memory is None else self.behind_hook(memory)
        x, _ = self.layer[0](x, mask)
        x = clamped(x)
        if memory is not None:
            x, _ = self.layer[1](x, memory)
            x = clamped(x)
        x = self.layer[-1](x)
        x = clamped(x)
        return x


class UMT5Stack(StackParts):
    block_class = UMT5Block

    def kinds(self, config: ConfigReader, count: int) -> list[BlockKind]:
        """All of them have one."""
        del config
        return [BlockKind(biased=True)] * count

    def forward(
        self, batch: int, length: int, ids: Handle | None = None, memory: Handle | None = None
    ) -> Handle:
        inputs_embeds = self.embedded(batch, length, ids)
        attention_mask = None if memory is None else causal_mask(self.run, batch, length)
        x = self.dropout(inputs_embeds)
        for layer_module in self.layer_list:
            x = layer_module(x, attention_mask, memory)
        x = self.final_layer_norm(x)
        x = self.dropout(x)
        self.returned()
        return x


class UMT5Model(T5Model):
    stack_class = UMT5Stack

    @property
    def scales_output(self) -> bool:
        """Always."""
        return True
