"""Perceiver, on text: few latent vectors attend to many tokens, and a query for each token reads the latents.

(transformers 5.23: models/perceiver)
"""

from typing import Any, ClassVar

from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask
from memplan.classes.pictures.parts import InOrder
from memplan.classes.sensed.counted import Parts
from memplan.classes.sounds.base import begin
from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import in_heads, matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import expanded, linear, softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import written_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

DECODER_KEY_WIDTH = 256
"""Of the decoder's queries and keys: 8 heads of 32 (``PerceiverForMaskedLM.__init__``)."""
DECODER_HEADS = 8


class PerceiverSelfAttention(Module):
    """Of vectors to themselves, or to others of another width."""

    def __init__(
        self, config: ConfigReader, size: int, source: int, keys: int, values: int, heads: int
    ) -> None:
        self.layernorm1 = LayerNorm(size)
        if source:
            self.layernorm2 = LayerNorm(source)
        self.key_dim, self.value_dim = (
            config.divide(name, width, "the number of heads", heads)
            for name, width in (("qk_channels", keys), ("v_channels", values))
        )
        self.query = Linear(size, keys, bias=True, role=WeightRole.QUERY_KEY)
        self.key = Linear(source or size, keys, bias=True, role=WeightRole.QUERY_KEY)
        self.value = Linear(source or size, values, bias=True)
        self.dropout = Dropout(config.number("attention_probs_dropout_prob", default=0.1))

    def forward(
        self, hidden_states: Handle, inputs: Handle | None, inputs_mask: Handle | None
    ) -> Handle:
        hidden_states = self.layernorm1(hidden_states)
        inputs = hidden_states if inputs is None else self.layernorm2(inputs)
        queries = in_heads(self.query(hidden_states), self.key_dim)
        keys = self.key(inputs)
        values = self.value(inputs)
        keys, values = in_heads(keys, self.key_dim), in_heads(values, self.value_dim)
        attention_scores = matmul(queries, keys.transpose(2, 3))
        attention_scores = attention_scores / self.key_dim**0.5
        if inputs_mask is not None:
            attention_scores = attention_scores + inputs_mask
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, values)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*hidden_states.shape[:2], -1)
        return context_layer


class PerceiverAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(
        self, config: ConfigReader, size: int, source: int, keys: int, values: int, heads: int,
        *, added: bool,
    ) -> None:  # fmt: skip
        self.self = PerceiverSelfAttention(config, size, source, keys, values, heads)
        outputs, role = size if source else values, WeightRole.ATTENTION_OUTPUT
        self.output = Parts(dense=Linear(values, outputs, bias=True, role=role))
        self.added = added

    def forward(
        self, hidden_states: Handle, inputs: Handle | None, inputs_mask: Handle | None
    ) -> Handle:
        self_outputs = self.self(hidden_states, inputs, inputs_mask)
        attention_output: Handle = self.output.children["dense"](self_outputs)
        if self.added:
            attention_output = attention_output + hidden_states
        return attention_output


class PerceiverLayer(Module):
    def __init__(
        self, config: ConfigReader, size: int, *sizes: int, factor: int, added: bool = True
    ) -> None:
        self.attention = PerceiverAttention(config, size, *sizes, added=added)
        self.layernorm = LayerNorm(size)
        self.mlp = InOrder(
            dense1=Linear(size, factor * size, bias=True),
            intermediate_act_fn=ActivationModule(tower_activation(config, "hidden_act")),
            dense2=Linear(factor * size, size, bias=True),
        )
        self.mlp.block = LayerBlock.NETWORK

    def forward(
        self,
        hidden_states: Handle,
        inputs: Handle | None = None,
        inputs_mask: Handle | None = None,
    ) -> Handle:
        attention_output = self.attention(hidden_states, inputs, inputs_mask)
        layer_output = self.feed_forward_chunk(attention_output)
        layer_output = layer_output + attention_output
        return layer_output

    def feed_forward_chunk(self, attention_output: Handle) -> Handle:
        """What follows the attention."""
        layer_output = self.layernorm(attention_output)
        layer_output = self.mlp(layer_output)
        return layer_output


class PerceiverEncoder(Module):
    """One layer that reads what is given, then a block of layers, which may be run several times."""

    def __init__(self, config: ConfigReader, width: int) -> None:
        latents = config.integer("d_latents")
        shape = config.text("cross_attention_shape_for_attention")
        wide = {"q": latents, "kv": width}
        config.choice("cross_attention_shape_for_attention", shape, wide)
        keys, values = (config.optional_integer(name) for name in ("qk_channels", "v_channels"))
        first, own = keys or wide[shape], keys or latents
        self.cross_attention = PerceiverLayer(
            config, latents, width, first, values or first,
            config.integer("num_cross_attention_heads"),
            factor=config.integer("cross_attention_widening_factor"),
            added=config.flag("use_query_residual"),
        )  # fmt: skip
        sizes = latents, 0, own, values or own, config.integer("num_self_attention_heads")
        factor = config.integer("self_attention_widening_factor")
        self.self_attends = LayerList(
            "encoder.layers", [None] * config.layers("num_self_attends_per_block"),
            lambda _: PerceiverLayer(config, *sizes, factor=factor),
        )  # fmt: skip

    def forward(self, hidden_states: Handle, inputs: Handle, mask: Handle) -> Handle:
        hidden_states = self.cross_attention(hidden_states, inputs, mask)
        for layer_module in self.self_attends:
            hidden_states = layer_module(hidden_states)
        return hidden_states


class PerceiverTextPreprocessor(Module):
    def __init__(self, config: ConfigReader, width: int) -> None:
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.embeddings = Embedding(rows, width, role=role)
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), width)

    def forward(self, inputs: Handle) -> tuple[Handle, Handle]:
        embeddings_without_pos = self.embeddings(inputs.shape, inputs)
        length = inputs.shape[1]
        position_ids = made_by(self.run, OperationKind.ARANGE, (length,), DType.INT64)
        embeddings = embeddings_without_pos + self.position_embeddings((1, length), position_ids)
        return embeddings, embeddings_without_pos


class Vectors(Module):
    """A parameter, spread over samples."""

    def __init__(self, name: str, rows: int, width: int) -> None:
        self.name = name
        setattr(self, name, Weight(rows, width))

    def forward(self, batch: int) -> Handle:
        vectors = self.operand(self.weights[self.name])
        shape = batch, *vectors.shape
        spread = expanded(vectors, shape)
        return Handle(self.run, spread.record, shape, (0, *vectors.strides))


class PerceiverBasicDecoder(Module):
    def __init__(self, config: ConfigReader, width: int) -> None:
        positions = config.integer("max_position_embeddings")
        self.output_position_encodings = Vectors("position_embeddings", positions, width)
        self.decoding_cross_attention = PerceiverLayer(
            config, width, config.integer("d_latents"), DECODER_KEY_WIDTH, width, DECODER_HEADS,
            factor=1, added=False,
        )  # fmt: skip

    def forward(self, query: Handle, z: Handle) -> Handle:
        output: Handle = self.decoding_cross_attention(query, z)
        return output


class PerceiverStates(PictureStates):
    """What it reads is its caller's."""

    is_counted = True
    drops = "input_preprocessor", "decoder"


class PerceiverEmbeddingDecoder(Module):
    def __init__(self, rows: int) -> None:
        self.bias = Weight(rows)

    def forward(self, hidden_states: Handle, table: Embedding) -> Handle:
        batch, length, _ = hidden_states.shape
        output = linear(hidden_states.view(batch * length, -1), self, table.weight)
        output = output + self.operand(self.bias)
        return output


class PerceiverForMaskedLM(PictureTask):
    """Logits come from the tokens' table."""

    begins_head = True

    def add_head(self, config: ConfigReader) -> None:
        del config
        self.embedding_decoder = PerceiverEmbeddingDecoder(self.spec.vocab_size)

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        del others
        table = self.model.children["input_preprocessor"].children["embeddings"]
        assert isinstance(table, Embedding)
        logits = self.embedding_decoder(last_hidden_state, table)
        self.run.returned.append(logits.record)
        self.run.give_out(logits.record)
        labels = from_batch(self.run, logits.numel // self.spec.vocab_size, DType.INT64)
        return cross_entropy(self.run, logits.record, labels)


class PerceiverModel(PictureModel):
    """Without the table and the decoder that other classes give it."""

    prefix = "perceiver"
    bare = PerceiverStates
    endings: ClassVar[dict[str, type[PictureTask]]] = {"ForMaskedLM": PerceiverForMaskedLM}

    def __init__(self, config: ConfigReader) -> None:
        width = self.width = config.integer("d_model")
        self.vocab = config.integer("vocab_size")
        self.context = config.integer("max_position_embeddings")
        self.blocks = config.integer("num_blocks", default=1)
        self.input_preprocessor = PerceiverTextPreprocessor(config, width)
        latents = config.integer("num_latents"), config.integer("d_latents")
        self.embeddings = Vectors("latents", *latents)
        self.encoder = PerceiverEncoder(config, width)
        self.decoder = PerceiverBasicDecoder(config, width)
        self.picture = replace(self.described(0, channels=0), stacks=("encoder", "decoder"))

    def left_out(self, ending: str) -> bool:
        """Of blocks that run twice only the weights are known."""
        del ending
        return self.blocks > 1

    def inputs(self) -> Handle:
        """Ids of exactly so many tokens."""
        run, length = self.run, self.context
        if run.options.seq_len not in (1, length):
            msg = (
                f"seq_len: {run.options.seq_len}: this model's class spells {length} tokens, no fewer "
                "and no more"
            )
            raise SetupError(msg)
        shape = run.options.batch_size, length
        return Handle(run, from_batch(run, shape[0] * length, DType.INT64), shape)

    def forward(self, inputs: Handle) -> tuple[Handle]:
        batch, length = inputs.shape
        inputs, inputs_without_pos = self.input_preprocessor(inputs)
        attention_mask = made_by(self.run, OperationKind.ONES, (batch, length), DType.FP32)
        begin(self, "encoder.cross_attention", ModelPart.OTHER, inputs)
        embedding_output = self.embeddings(batch)
        attention_mask = written_mask(
            attention_mask, embedding_output, queries=embedding_output.shape[1]
        )
        sequence_output = self.encoder(embedding_output, inputs, attention_mask)
        begin(self, "decoder", ModelPart.OTHER, sequence_output)
        decoder_query = self.decoder.children["output_position_encodings"](batch)
        logits = self.decoder(decoder_query, sequence_output)
        del attention_mask, inputs_without_pos
        return (logits,)
