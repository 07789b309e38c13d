"""ProphetNet: BART's layers in other words, and a decoder that predicts several tokens ahead.

Beside its tokens stand streams that each predict one of the next few; they lie behind the tokens in one long
sequence. Tokens attend to one another; each stream attends to the tokens and to itself, so that its keys and
values are both, joined. The bias of distances is gathered out of a product of the hidden states.
(transformers 5.23, models/prophetnet/modeling_prophetnet.py)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.translating.layers import LAYER_NORM
from memplan.classes.translating.stacks import (
    ConditionalGeneration,
    Decoded,
    DecodedStates,
    SequenceTask,
    Stack,
    StackLayer,
    Tasks,
    TwoStacks,
    begin_embedding,
    projected_heads,
    shifted,
)
from memplan.dtypes import DType
from memplan.families.llama import named_activation
from memplan.families.request import ReadRequest
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear, dropout
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import made_from, rows_of, softmax, total
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.run import Run
from memplan.graph.operations.losses import cross_entropy
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import EmbeddingSpec, LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole

DROPOUT = 0.1
"""What the class fills in."""


class ProphetNetPositionalEmbeddings(Embedding):
    def __init__(self, config: ConfigReader) -> None:
        self.max_length = config.integer("max_position_embeddings")
        super().__init__(self.max_length, config.integer("hidden_size"))

    def positions(self, batch: int, length: int) -> tuple[Handle, Handle]:
        """Rows for each token of each sequence, and the numbers of these."""
        position_ids = made_by(self.run, OperationKind.CUMSUM, (batch, length), DType.INT64)
        found: Handle = self((batch, length), position_ids)
        return found, position_ids


class Projections(Module):
    """Queries, keys and values, and what all heads make of them."""

    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, stack: str, *, causal: bool = False) -> None:
        hidden, key = config.integer("hidden_size"), f"num_{stack}_attention_heads"
        self.num_heads, self.causal = config.integer(key), causal
        self.head_dim = config.divide("hidden_size", hidden, key, self.num_heads)
        self.attention_dropout = config.number("attention_dropout", default=DROPOUT)
        self.dropout = config.number("dropout", default=DROPOUT)
        role = WeightRole.QUERY_KEY
        self.key_proj = Linear(hidden, hidden, bias=True, role=role)
        self.value_proj = Linear(hidden, hidden, bias=True)
        self.query_proj = Linear(hidden, hidden, bias=True, role=role)
        self.out_proj = Linear(hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)

    def facts(self) -> AttentionSpec:
        """What others read of it."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            query_bias=True, key_bias=True, value_bias=True, output_bias=True,
            causal=self.causal, dropout=self.attention_dropout,
        )  # fmt: skip


class ProphetNetAttention(Projections):
    def forward(self, x: Handle, key_value_states: Handle | None = None) -> Handle:
        batch, tgt_len, hidden = x.shape
        query_states = self.query_proj(x) / 8.0
        current_states = x if key_value_states is None else key_value_states
        key_states = self.key_proj(current_states)
        key_states = projected_heads(key_states, self.head_dim)
        value_states = self.value_proj(current_states)
        value_states = value_states.view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
        query_states = query_states.view(batch, tgt_len, self.num_heads, self.head_dim)
        query_states = query_states.transpose(1, 2)
        attn_weights = einsum("bsij,bsjk->bsik", query_states, key_states.transpose(2, 3))
        attn_weights = softmax(attn_weights)
        attn_probs = dropout(attn_weights, self.attention_dropout)
        attn_output = einsum("bsij,bsjk->bsik", attn_probs, value_states)
        attn_output = attn_output.transpose(1, 2).reshape(batch, tgt_len, hidden)
        attn_output = self.out_proj(attn_output)
        attn_output = dropout(attn_output, self.dropout)
        return attn_output


class CrossAttention(ProphetNetAttention):
    block = LayerBlock.CROSS_ATTENTION


def stacked(parts: list[Handle], dim: int) -> Handle:
    """``torch.stack``."""
    return concatenate(*(each.unsqueeze(dim) for each in parts), dim=dim)


def gathered(x: Handle, index: Handle) -> Handle:
    """``torch.gather(x, dim=1, index=index)``: keeps both."""
    run, made = x.run, empty(x.run, index.shape, x.dtype)
    run.record(
        OperationKind.GATHER, (x.record, index.record), (made.record,),
        saves=(x.record, index.record), gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=x.record.storage.num_bytes if run.decomposed else 0,
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


class ProphetNetNgramSelfAttention(Projections):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config, "decoder", causal=True)
        self.ngram, self.num_buckets = config.integer("ngram"), config.integer("num_buckets")
        self.relative_pos_embeddings = Linear(
            config.integer("hidden_size"), self.num_buckets * self.num_heads, bias=True
        )

    def shape(self, tensor: Handle) -> Handle:
        """Copied head by head."""
        batch, length, _ = tensor.shape
        return (
            tensor.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2).contiguous()
        )

    def forward(
        self, x: Handle, masks: tuple[Handle, Handle], buckets: tuple[Handle, Handle]
    ) -> tuple[Handle, Handle, Handle]:
        batch, length, hidden = x.shape
        query_states = self.query_proj(x)
        key_states = self.key_proj(x)
        value_states = self.value_proj(x)
        query_states = query_states / 8.0
        query_states = self.shape(query_states)
        key_states = self.shape(key_states)
        value_states = self.shape(value_states)
        tokens = length // (1 + self.ngram)
        pieces = (tokens,) * (1 + self.ngram)
        main_hidden_states, *predict_hidden = x.split(*pieces, dim=1)
        main_query_states, *predict_queries = query_states.split(*pieces, dim=2)
        main_key_states, *predict_keys = key_states.split(*pieces, dim=2)
        main_value_states, *predict_values = value_states.split(*pieces, dim=2)
        main_attn_weights = einsum(
            "bntc,bncs->bnts", main_query_states, main_key_states.transpose(2, 3)
        )
        main_relative = self.main_relative(main_hidden_states, buckets[0])
        main_attn_weights = main_attn_weights + main_relative
        main_attn_weights = main_attn_weights + masks[0]
        main_attn_probs = softmax(main_attn_weights, dtype=DType.FP32).to(main_attn_weights.dtype)
        main_attn_probs = dropout(main_attn_probs, self.attention_dropout)
        main_attn_output = einsum("bntc,bncs->bnts", main_attn_probs, main_value_states)
        main_attn_output = main_attn_output.transpose(1, 2).reshape(batch, tokens, hidden)
        main_attn_output = self.out_proj(main_attn_output)
        predict_query_states = stacked(predict_queries, 1)
        predict_key_states = stacked(
            [concatenate(main_key_states, each, dim=2) for each in predict_keys], 1
        )
        predict_hidden_states = stacked(predict_hidden, 2)
        predict_value_states = stacked(
            [concatenate(main_value_states, each, dim=2) for each in predict_values], 2
        )
        predict_attn_weights = einsum(
            "bnhtc,bnhsc->bnhts", predict_query_states, predict_key_states
        )
        predict_relative = self.predict_relative(predict_hidden_states, buckets[1])
        predict_attn_weights = predict_attn_weights + predict_relative
        predict_mask = written_as(masks[1], predict_attn_weights)
        predict_attn_weights = predict_attn_weights + predict_mask
        predict_attn_probs = softmax(predict_attn_weights, dtype=DType.FP32)
        predict_attn_probs = predict_attn_probs.to(predict_attn_weights.dtype)
        predict_attn_probs = dropout(predict_attn_probs, self.attention_dropout)
        predict_attn_output = einsum(
            "bnhts,bnhsc->bnhtc", predict_attn_probs, predict_value_states.transpose(1, 2)
        )
        predict_attn_output = predict_attn_output.transpose(2, 3)
        predict_attn_output = predict_attn_output.reshape(batch, self.ngram, tokens, hidden)
        predict_attn_output = self.out_proj(predict_attn_output)
        attn_output = concatenate(main_attn_output, predict_attn_output, dim=1)
        attn_output = dropout(attn_output, self.dropout)
        return attn_output, main_attn_probs, predict_attn_probs

    def main_relative(self, x: Handle, buckets: Handle) -> Handle:
        """``get_main_relative_pos_embeddings``."""
        batch, tokens, _ = x.shape
        rel_pos_embeddings = self.relative_pos_embeddings(x)
        rel_pos_embeddings = rel_pos_embeddings.view(batch, tokens, self.num_buckets, -1)
        rel_pos_embeddings = rel_pos_embeddings.permute(0, 3, 1, 2)
        rows = batch * self.num_heads * tokens
        buckets = buckets.apart(OperationKind.REPEAT, shape=(self.num_heads, *buckets.shape))
        buckets = buckets.apart(OperationKind.TO, dtype=DType.INT64).view(rows, -1)
        rel_pos_embeddings = rel_pos_embeddings.reshape(rows, self.num_buckets)
        found = gathered(rel_pos_embeddings, buckets)
        return found.view(batch, self.num_heads, tokens, -1)

    def predict_relative(self, x: Handle, buckets: Handle) -> Handle:
        """``get_predict_relative_pos_embeddings``."""
        batch, tokens, ngram, _ = x.shape
        x = x.transpose(1, 2)
        rel_pos_embeddings = self.relative_pos_embeddings(x)
        rel_pos_embeddings = rel_pos_embeddings.view(batch, ngram, tokens, self.num_buckets, -1)
        rel_pos_embeddings = rel_pos_embeddings.permute(0, 2, 1, 4, 3)
        rows = batch * ngram * tokens * self.num_heads
        rel_pos_embeddings = rel_pos_embeddings.reshape(rows, self.num_buckets)
        buckets = buckets.apart(
            OperationKind.REPEAT, shape=(ngram * self.num_heads, *buckets.shape)
        )
        buckets = buckets.apart(OperationKind.TO, dtype=DType.INT64).view(rows, -1)
        found = gathered(rel_pos_embeddings, buckets)
        return found.view(batch, ngram, self.num_heads, tokens, -1)


def written_as(mask: Handle, scores: Handle) -> Handle:
    """A mask of all positions, spread over sequences and heads, in the format of the scores: where it has another
    one it is written out."""
    if mask.dtype is scores.dtype:
        return mask
    return made_from(OperationKind.TO, scores.shape, scores.dtype, mask)


class ProphetNetFeedForward(Module):
    def __init__(self, config: ConfigReader, ffn_dim: int) -> None:
        hidden, key = config.integer("hidden_size"), "activation_function"
        self.activation_fn = ActivationModule(
            named_activation(config, key, config.text(key, default="gelu"))
        )
        self.intermediate = Linear(hidden, ffn_dim, bias=True)
        self.output = Linear(ffn_dim, hidden, bias=True)
        self.activation_dropout = config.number("activation_dropout", default=DROPOUT)
        self.dropout = config.number("dropout", default=DROPOUT)

    def forward(self, x: Handle) -> Handle:
        x = self.intermediate(x)
        x = self.activation_fn(x)
        x = dropout(x, self.activation_dropout)
        x = self.output(x)
        x = dropout(x, self.dropout)
        return x


class LayerParts(StackLayer):
    self_attn: Projections
    feed_forward: ProphetNetFeedForward

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        crossing, network = self.children.get("cross_attn"), self.feed_forward
        return LayerSpec(
            attention=self.self_attn.facts(),
            cross_attention=crossing.facts() if isinstance(crossing, Projections) else None,
            feed_forward=FeedForwardSpec(
                intermediate_size=network.intermediate.out_features,
                activation=network.activation_fn.kind, bias=True,
                activation_dropout=network.activation_dropout,
            ),
            norm=LAYER_NORM, placement=NormPlacement.POST, dropout=network.dropout,
        )  # fmt: skip


class ProphetNetEncoderLayer(LayerParts):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn: ProphetNetAttention = ProphetNetAttention(config, "encoder")
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.feed_forward = ProphetNetFeedForward(config, config.integer("encoder_ffn_dim"))
        self.feed_forward_layer_norm = LayerNorm(hidden)

    def forward(self, x: Handle) -> Handle:
        attention_output = self.self_attn(x)
        x = self.self_attn_layer_norm(attention_output + x)
        feed_forward_output = self.feed_forward(x)
        x = self.feed_forward_layer_norm(feed_forward_output + x)
        return x


class ProphetNetDecoderLayer(LayerParts):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = ProphetNetNgramSelfAttention(config)
        self.self_attn_layer_norm = LayerNorm(hidden)
        if config.flag("add_cross_attention"):
            self.cross_attn = CrossAttention(config, "decoder")
            self.cross_attn_layer_norm = LayerNorm(hidden)
        self.feed_forward = ProphetNetFeedForward(config, config.integer("decoder_ffn_dim"))
        self.feed_forward_layer_norm = LayerNorm(hidden)

    def forward(
        self,
        x: Handle,
        memory: Handle,
        masks: tuple[Handle, Handle],
        buckets: tuple[Handle, Handle],
    ) -> Handle:
        memory = self.behind_hook(memory)
        ngram_attention_output, self_attn_weights, ngram_weights = self.self_attn(x, masks, buckets)
        x = self.self_attn_layer_norm(x + ngram_attention_output)
        if "cross_attn" in self.children:
            attention_output = self.cross_attn(x, memory)
            x = self.cross_attn_layer_norm(attention_output + x)
        feed_forward_output = self.feed_forward(x)
        x = self.feed_forward_layer_norm(feed_forward_output + x)
        del self_attn_weights, ngram_weights
        return x


class ProphetNetStack(Stack):
    table = "word_embeddings"
    layer_class: Callable[[ConfigReader], LayerParts]

    def add_tables(self, config: ConfigReader) -> None:
        """Declare tables of tokens and positions."""
        rows, hidden = config.integer("vocab_size"), config.integer("hidden_size")
        self.dropout = config.number("dropout", default=DROPOUT)
        self.word_embeddings = Embedding(rows, hidden)
        self.position_embeddings = ProphetNetPositionalEmbeddings(config)

    def add_layers(self, config: ConfigReader) -> None:
        """Declare layers, all alike."""
        kinds = [None] * config.layers(f"num_{self.name}_layers")
        self.layers = LayerList(f"{self.name}.layers", kinds, lambda _: self.layer_class(config))

    def embedding_facts(self) -> EmbeddingSpec:
        """What others read of its tables."""
        table = self.word_embeddings
        rows = self.position_embeddings.max_length
        return EmbeddingSpec(embedding_size=table.width, num_positions=rows, dropout=self.dropout)

    def looked_up(self, batch: int, length: int, ids: Handle | None = None) -> Handle:
        """Rows of the table, of which an adapter may want a gradient."""
        self.run.enter(self.name)
        made: Handle = self.word_embeddings((batch, length), ids)
        self.run.embedded(made.record, self.run.parameters[self.word_embeddings.weight])
        return made


class ProphetNetEncoder(ProphetNetStack):
    name = "encoder"
    layer_class: Callable[[ConfigReader], LayerParts] = ProphetNetEncoderLayer

    def __init__(self, config: ConfigReader) -> None:
        self.add_tables(config)
        self.embeddings_layer_norm = LayerNorm(config.integer("hidden_size"))
        self.add_layers(config)

    def forward(self, batch: int, length: int) -> Handle:
        inputs_embeds = self.looked_up(batch, length)
        position_embeddings, position_ids = self.position_embeddings.positions(batch, length)
        x = inputs_embeds + position_embeddings
        x = self.embeddings_layer_norm(x)
        x = dropout(x, self.dropout)
        for encoder_layer in self.layers:
            x = encoder_layer(x)
        del position_ids
        return x


class ProphetNetDecoder(ProphetNetStack):
    name = "decoder"
    layer_class: Callable[[ConfigReader], LayerParts] = ProphetNetDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.ngram = config.integer("ngram")
        self.add_tables(config)
        self.ngram_embeddings = Embedding(self.ngram, hidden)
        self.add_layers(config)
        self.embeddings_layer_norm = LayerNorm(hidden)

    def forward(self, batch: int, length: int, ids: Handle, memory: Handle) -> Handle:
        run = self.run
        inputs_embeds = self.looked_up(batch, length, ids)
        own_positions, position_ids = self.position_embeddings.positions(batch, length)
        buckets = relative_buckets(run, self.position_embeddings.max_length, batch, length)
        following = position_ids.apart(OperationKind.ADD_SCALAR)
        following_positions = self.position_embeddings((batch, length), following)
        del following
        x = inputs_embeds + own_positions
        ngram_embeddings = self.ngram_embeddings.operand(self.ngram_embeddings.weight)
        ngram_hidden_states = [
            ngram_embeddings.select(0) + following_positions for _ in range(self.ngram)
        ]
        masks = token_mask(run, length), self.stream_mask(length, x.dtype)
        x = concatenate(x, *ngram_hidden_states, dim=1)
        x = self.embeddings_layer_norm(x)
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, memory, masks, buckets)
        return x

    def stream_mask(self, tokens: int, dtype: DType) -> Handle:
        """``ngram_attention_bias`` of all positions, of which those of the sequence are copied."""
        run, positions = self.run, self.position_embeddings.max_length
        pairs = positions**2
        half = self.ngram * pairs
        differences = allocated_bytes(pairs, DType.INT64)
        allowed, diagonal = allocated_bytes(half, DType.BOOL), allocated_bytes(pairs, DType.BOOL)
        block, row = allocated_bytes(half, dtype), allocated_bytes(positions, DType.INT64)
        whole = empty(run, (self.ngram, positions, 2 * positions), dtype)
        run.record(
            OperationKind.WHERE, (), (whole.record,),
            forward_scratch_bytes=(
                row, row, differences, allowed, ~2, allowed, ~3, diagonal, block, block, RESULT,
            ),
        )  # fmt: skip
        shape = 1, self.ngram, 1, tokens, 2 * tokens
        return made_from(OperationKind.CAT, shape, dtype, whole)


def token_mask(run: Run, tokens: int) -> Handle:
    """``prepare_attention_mask``."""
    full = made_by(run, OperationKind.MASK, (1, 1, tokens, tokens), run.compute)
    return full.apart(OperationKind.TRIU)


def relative_buckets(run: Run, positions: int, batch: int, tokens: int) -> tuple[Handle, Handle]:
    """``compute_buffered_relative_buckets``: of all positions' distances, of which the sequence's are copied."""
    length = positions - 1
    position_ids = made_by(run, OperationKind.ARANGE, (length,), DType.INT64)
    main_positions = distances(run, length, length)
    predict_positions = distances(run, length, 2 * length)
    main_buckets = bucket_table(main_positions)
    predict_buckets = bucket_table(predict_positions)
    del main_positions, predict_positions
    main_buckets = made_from(
        OperationKind.REPEAT, (batch, tokens, tokens), DType.INT32, main_buckets
    )
    joined = made_from(OperationKind.CAT, (tokens, 2 * tokens), DType.INT32, predict_buckets)
    streams = joined.apart(OperationKind.REPEAT, shape=(batch, tokens, 2 * tokens))
    del joined, predict_buckets, position_ids
    return main_buckets, streams


def distances(run: Run, rows: int, columns: int) -> Handle:
    """Positions repeated for each row, less the row's own."""
    made = empty(run, (rows, columns), DType.INT64)
    run.record(
        OperationKind.SUB, (), (made.record,),
        forward_scratch_bytes=(made.record.storage.num_bytes, RESULT),
    )  # fmt: skip
    return made


def bucket_table(relative: Handle) -> Handle:
    """``compute_relative_buckets``: distances turned round, those that are small, logarithms of the others."""
    run, made = relative.run, empty(relative.run, relative.shape, DType.INT32)
    wide, four = relative.record.storage.num_bytes, made.record.storage.num_bytes
    small = allocated_bytes(relative.numel, DType.BOOL)
    turned = (wide, wide, wide, ~1, ~0, small)
    logarithms = (four, four, ~6, four, ~7, four, ~9, four, ~11, four, ~13)
    bounded = (four, four, ~17, four, ~18, four, ~20, ~15)
    chosen = (four, four, ~25, RESULT)
    run.record(
        OperationKind.RELATIVE_POSITION_BUCKET, (relative.record,), (made.record,),
        forward_scratch_bytes=(*turned, *logarithms, *bounded, *chosen),
    )  # fmt: skip
    return made


class ProphetNetForConditionalGeneration(ConditionalGeneration):
    def add_head(self, config: ConfigReader) -> None:
        """The output matrix, and whether labels are smoothed."""
        super().add_head(config)
        self.smooths = config.number("eps", default=0.0) > 0.0

    def decoder_ids(self, batch: int) -> Handle:
        """The labels, shifted before the base model is called."""
        return shifted(self, batch)

    def loss_of(self, outputs: Decoded) -> Tensor:
        """Logits of all streams but the tokens' own, and their mean loss."""
        run, decoder = self.run, self.two.decoder
        assert isinstance(decoder, ProphetNetDecoder)
        states, ngram = outputs.last_hidden_state, decoder.ngram
        batch, length, width = states.shape
        tokens = length // (1 + ngram)
        predicting_streams = states.narrow(ngram * tokens, dim=1)
        predicting_streams = predicting_streams.view(batch, ngram, tokens, width)
        predict_logits = self.lm_head(predicting_streams).view(batch, ngram, tokens, -1)
        logits = predict_logits.select(1).contiguous()
        labels = made_by(run, OperationKind.ZEROS, (ngram, batch, tokens), DType.INT64)
        turned = predict_logits.transpose(0, 1).contiguous()
        full = turned.float()
        loss = cross_entropy(run, full.record, labels.record)
        if self.smooths:
            loss = self.smoothed(full, Handle(run, loss, ()))
        further: tuple[Tensor, ...] = ()
        if ngram > 1:
            further = (
                run.slice(predict_logits.record, predict_logits.numel // ngram * (ngram - 1)),
            )
        hand_out(run, logits.record, *further)
        return loss

    def smoothed(self, logits: Handle, loss: Handle) -> Tensor:
        """The mean of all log-probabilities, those of masked tokens left out, beside the loss."""
        made = self.run.segment.operations
        lprobs = next(
            each.outputs[0] for each in reversed(made) if each.kind is OperationKind.LOG_SOFTMAX
        )
        summed = -total(Handle(self.run, lprobs, logits.shape))
        mask = made_by(self.run, OperationKind.NE, summed.shape, DType.BOOL)
        smooth_loss = rows_of(summed, (1, summed.numel))
        del mask
        return (loss * 1.0 + smooth_loss.mean() * 1.0).record


class ProphetNetDecoderAlone(SequenceTask):
    """The decoder without its encoder, and without a head."""

    is_counted = is_base = True

    def begin(self) -> None:
        """Its own segment begins."""
        begin_embedding(self, "decoder")

    def add_head(self, config: ConfigReader) -> None:
        """There is no encoder, and no table but its own."""
        del config
        table = self.two.shared
        for name in ("encoder", self.two.table):
            self.two.children.pop(name)
        setattr(self.two.decoder, self.two.table, Embedding(*table.weight.shape))


class ProphetNetModel(TwoStacks):
    prefix = "prophetnet"
    table = "word_embeddings"
    eager_only = True
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: ProphetNetForConditionalGeneration,
        Task.BASE: DecodedStates,
        Task.OTHER: ProphetNetDecoderAlone,
    }

    @staticmethod
    def understood(config: ConfigReader, request: ReadRequest) -> ReadRequest:
        """A config may be that of a decoder without its encoder."""
        named = any(each.endswith("Decoder") for each in config.texts("architectures"))
        return replace(request, task=Task.OTHER) if request.task is None and named else request

    def __init__(self, config: ConfigReader) -> None:
        rows, hidden = config.integer("vocab_size"), config.integer("hidden_size")
        self.add_table(config, Embedding(rows, hidden))
        self.encoder = ProphetNetEncoder(config)
        self.decoder = ProphetNetDecoder(config)
        self.share_table()
