"""BigBird: BERT whose tokens attend in blocks, to the first and the last, to neighbours, to some drawn by chance.

The first two and the last two blocks of queries have products of their own; all others share four. Nothing is
dropped out. The weights are written into a matrix of all pairs, which no loss reads. Sequences too short for
blocks attend to all pairs. (transformers 5.23: models/big_bird/modeling_big_bird.py, whose attention
models/bigbird_pegasus copies)
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from memplan.classes.encoders.base import Encoded, Unpadding, first_token
from memplan.classes.encoders.bert import BertForPreTraining, BertModel
from memplan.classes.encoders.layers import (
    Attention,
    AttentionParts,
    Intermediate,
    Layer,
    Output,
    PlainScores,
    Pooler,
    Stack,
)
from memplan.classes.encoders.tables import Embeddings, token_rows, zero_ids
from memplan.classes.encoders.tasks import (
    ClassificationHead,
    EncoderTask,
    HeadClassification,
    PooledMultipleChoice,
    Tasks,
)
from memplan.dtypes import DType, promote
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Dropout, Linear
from memplan.graph.modules.contractions import einsum, matmul
from memplan.graph.modules.functional import (
    activated,
    add_in_place,
    gather,
    made_from,
    softmax,
)
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.masks import written_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.strides import Shape
from memplan.graph.operations.losses import span_loss
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.networks import Activation
from memplan.units import round_up


class Masks(NamedTuple):
    """Of the middle blocks, of queries, of keys, and of all tokens by blocks."""

    band: Handle
    of_queries: Handle
    of_keys: Handle
    blocked: Handle


class Blocked(NamedTuple):
    """Keys or values: of all tokens, by blocks, and copies of the blocks that were drawn."""

    whole: Handle
    blocks: Handle
    drawn: Handle


def read_type(config: ConfigReader) -> bool:
    """Whether it attends in blocks, of sequences that are long enough."""
    key = "attention_type"
    return config.choice(key, config.text(key), ("block_sparse", "original_full")) == "block_sparse"


class BlockSizes(NamedTuple):
    """Of what is attended to."""

    block: int
    random: int

    def padded(self, length: int) -> int | None:
        """Tokens that a sequence is padded to; None: it is too short for blocks."""
        if length <= (5 + 2 * self.random) * self.block:
            return None
        return round_up(length, self.block)


def read_blocks(config: ConfigReader) -> BlockSizes | None:
    """Sizes of its blocks; None: it never attends in such."""
    if not read_type(config):
        return None
    return BlockSizes(config.integer("block_size"), config.integer("num_random_blocks"))


def create_masks(mask: Handle, block: int) -> Masks:
    """``create_masks_for_block_sparse_attn``."""
    batch, length = mask.shape
    blocks = length // block
    blocked = mask.view(batch, blocks, block)
    exp_blocked_to_pad = made_from(
        OperationKind.CAT, (batch, blocks - 4, 3 * block), mask.dtype, mask
    )
    band_mask = crossed(
        blocked.narrow(blocks - 4, dim=1),
        exp_blocked_to_pad,
        (batch, 1, blocks - 4, block, 3 * block),
    )
    of_queries, of_keys = mask.view(batch, 1, length, 1), mask.view(batch, 1, 1, length)
    return Masks(band_mask, of_queries, of_keys, blocked)


def crossed(one: Handle, two: Handle, shape: Shape) -> Handle:
    """``torch.einsum`` of masks over no dimension: their product, which autocast makes of copies."""
    autocast = one.run.autocast
    if autocast is not None and one.dtype.is_floating:
        two = two.to(autocast)
        one = one.to(autocast)
    return made_from(OperationKind.MUL, shape, one.dtype, one, two)


def inverted(mask: Handle) -> Handle:
    """``1.0 - mask``."""
    dtype = mask.dtype if mask.dtype.is_floating else DType.FP32
    return mask.apart(OperationKind.SUB, dtype=dtype)


def penalty(mask: Handle) -> Handle:
    """``mask * attn_mask_penalty``."""
    return mask.apart(OperationKind.MUL_SCALAR)


class BigBirdAttentionHeads(PlainScores):
    """To all pairs, and in blocks."""

    def __init__(self, config: ConfigReader) -> None:
        self.bias = config.flag("use_bias")
        super().__init__(config)
        self.sizes = read_blocks(config)

    def forward(self, x: Handle, mask: Handle | None, *beside: Handle) -> Attended:
        if not beside:
            return super().forward(x, mask)
        masks = Masks(*beside)
        batch, length, _ = x.shape
        query_layer, key_layer, value_layer = self.heads(x)
        context_layer, attention_probs = self.in_blocks(query_layer, key_layer, value_layer, masks)
        context_layer = context_layer.contiguous().view(batch, length, -1)
        return context_layer, attention_probs

    def in_blocks(
        self, query: Handle, key: Handle, value: Handle, masks: Masks
    ) -> tuple[Handle, Handle]:
        """``bigbird_block_sparse_attention``."""
        sizes, (batch, heads, length, _) = self.sizes, query.shape
        assert sizes is not None
        blocks = length // sizes.block
        shape = 1, heads, blocks - 2, sizes.random
        rand_attn = made_by(self.run, OperationKind.INDICES, shape, DType.INT64)
        if batch > 1:
            rand_attn = rand_attn.apart(OperationKind.CLONE, shape=(batch, *shape[1:]))
        rand_mask = self.drawn_mask(masks.blocked, rand_attn)
        queries, key_blocks, value_blocks = (self.blocked(each) for each in (query, key, value))
        keys = self.drawn_of(key, key_blocks, rand_attn)
        values = self.drawn_of(value, value_blocks, rand_attn)
        first = self.to_all(queries, keys, values, masks)
        second = self.to_some(queries, keys, values, masks, rand_mask)
        context_layer, middle = self.to_near(queries, keys, values, masks, rand_mask)
        second_last = self.to_some(queries, keys, values, masks, rand_mask)
        last = self.to_all(queries, keys, values, masks)
        context_layer = concatenate(
            first[0].unsqueeze(2), second[0].unsqueeze(2), context_layer,
            second_last[0].unsqueeze(2), last[0].unsqueeze(2), dim=2,
        )  # fmt: skip
        context_layer = context_layer.view(batch, heads, length, -1) * masks.of_queries
        context_layer = context_layer.transpose(1, 2)
        shape = batch, heads, length, length
        attention_probs = made_by(self.run, OperationKind.ZEROS, shape, context_layer.dtype)
        del middle
        return context_layer, attention_probs

    def blocked(self, x: Handle) -> Handle:
        """By blocks."""
        assert self.sizes is not None
        batch, heads, length, width = x.shape
        return x.seen_as(batch, heads, length // self.sizes.block, self.sizes.block, width)

    def drawn_mask(self, blocked: Handle, drawn: Handle) -> Handle:
        """``_create_rand_mask_from_inputs``."""
        batch, heads, windows, random = drawn.shape
        block, dtype = blocked.shape[-1], blocked.dtype
        rand_mask = made_from(
            OperationKind.GATHER, (batch, heads, windows, random * block), dtype, blocked, drawn
        )
        shape = batch, heads, windows, block, random * block
        return crossed(blocked.narrow(windows, dim=1), rand_mask, shape)

    def drawn_of(self, whole: Handle, blocks: Handle, drawn: Handle) -> Blocked:
        """``torch_gather_b2``: copies of the blocks that were drawn."""
        batch, heads, windows, random = drawn.shape
        block, width = blocks.shape[3:]
        shape: Shape = batch, heads, windows * random, block, width
        strides = heads * windows * random, windows * random, 1, 0, 0
        found = gather(blocks, seen_in(self.run, drawn.record, shape, strides), dim=2)
        blocks.leads_to(found, in_rows(blocks.shape))
        return Blocked(whole, blocks, found.view(batch, heads, windows, random * block, width))

    def to_all(
        self, queries: Handle, keys: Blocked, values: Blocked, masks: Masks
    ) -> tuple[Handle, ...]:
        """The first block, or the last; all that the function holds, what it found first."""
        product = matmul(queries.select(2), keys.whole.transpose(2, 3))
        product = product * 1.0
        product = add_in_place(product, penalty(inverted(masks.of_keys)))
        weights = softmax(product)
        context = matmul(weights, values.whole)
        return context, product, weights

    def to_some(
        self, queries: Handle, keys: Blocked, values: Blocked, masks: Masks, rand_mask: Handle
    ) -> tuple[Handle, ...]:
        """The second block, or the last but one: to four blocks and those drawn for it."""
        key_mat, value_mat = (
            concatenate(*(each.blocks.select(2) for _ in range(4)), each.drawn.select(2), dim=2)
            for each in (keys, values)
        )
        product = matmul(queries.select(2), key_mat.transpose(2, 3))
        batch, heads, block, seen = product.shape
        of_keys, dtype = masks.of_keys, rand_mask.dtype
        ones = made_by(self.run, OperationKind.ONES, (batch, 1, 1, seen - 4 * block), of_keys.dtype)
        seq_pad = made_from(OperationKind.CAT, (batch, 1, 1, seen), of_keys.dtype, of_keys, ones)
        ones = made_by(self.run, OperationKind.ONES, (batch, heads, block, 4 * block), dtype)
        rand_pad = made_from(OperationKind.CAT, product.shape, dtype, ones, rand_mask)
        del ones
        product = product * 1.0
        lesser = promote(of_keys.dtype, dtype)
        product = add_in_place(
            product, penalty(inverted(rand_pad.apart(OperationKind.MINIMUM, seq_pad, dtype=lesser)))
        )
        weights = softmax(product)
        context = matmul(weights, value_mat)
        return context, key_mat, value_mat, product, seq_pad, rand_pad, weights

    def to_near(
        self, queries: Handle, keys: Blocked, values: Blocked, masks: Masks, rand_mask: Handle
    ) -> tuple[Handle, tuple[Handle, ...]]:
        """All other blocks: to three neighbours, those drawn, the first and the last."""
        blocks, block = queries.shape[2] - 4, queries.shape[3]
        exp_keys, exp_values = (
            concatenate(*(each.blocks.narrow(blocks, dim=2) for _ in range(3)), dim=3)
            for each in (keys, values)
        )
        middle = queries.narrow(blocks, dim=2)
        inner_band = matmul(middle, exp_keys.transpose(3, 4))
        inner_band = inner_band * 1.0
        rand_band = matmul(middle, keys.drawn.narrow(blocks, dim=2).transpose(3, 4))
        rand_band = rand_band * 1.0
        first_band = einsum("bhlqd,bhkd->bhlqk", middle, keys.blocks.select(2))
        first_band = first_band * 1.0
        last_band = einsum("bhlqd,bhkd->bhlqk", middle, keys.blocks.select(2))
        last_band = last_band * 1.0
        inner_band = add_in_place(inner_band, penalty(inverted(masks.band)))
        edge = masks.of_keys.narrow(block).unsqueeze(3)
        first_band = add_in_place(first_band, penalty(inverted(edge)))
        last_band = add_in_place(last_band, penalty(inverted(edge)))
        rand_band = add_in_place(rand_band, penalty(inverted(rand_mask.narrow(blocks, dim=2))))
        band = concatenate(first_band, inner_band, rand_band, last_band)
        weights = softmax(band)
        context = matmul(weights.narrow(3 * block), exp_values)
        found = matmul(weights.narrow(values.drawn.shape[3]), values.drawn.narrow(blocks, dim=2))
        context = add_in_place(context, found)
        del found
        for _ in ("first", "last"):
            found = einsum("bhlqk,bhkd->bhlqd", weights.narrow(block), values.blocks.select(2))
            context = add_in_place(context, found)
            del found
        held = exp_keys, exp_values, inner_band, rand_band, first_band, last_band, band, weights
        return context, (*held, middle)


class BigBirdAttention(Attention):
    self_class: Callable[[ConfigReader], PlainScores] = BigBirdAttentionHeads

    def forward(self, x: Handle, *beside: Any) -> Attended:
        mask, *masks = beside
        if masks:
            *others, blocked = masks
            masks = [*(each.to(x.dtype) for each in others), blocked]
            del others
        attention_output, attn_weights = self.self(x, mask, *masks)
        attention_output = self.output(attention_output, x)
        return attention_output, attn_weights


class BigBirdLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = BigBirdAttention


class BigBirdEncoder(Stack):
    layer_class: Callable[[ConfigReader], Layer] = BigBirdLayer


class BigBirdEmbeddings(Embeddings):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.rescales = config.flag("rescale_embeddings", default=False)

    def forward(
        self,
        batch: int,
        length: int,
        token_type_ids: Handle | None = None,
        input_ids: Handle | None = None,
    ) -> Handle:
        inputs_embeds = token_rows(self.word_embeddings, batch, length, input_ids)
        if self.rescales:
            inputs_embeds = inputs_embeds * 1.0
        # A row of the buffer for all, which the kernel copies for each sequence.
        copied = token_type_ids is None and batch > 1
        numbers = zero_ids(self, batch, length) if copied else None
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        del numbers
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((1, length))
        embeddings += position_embeddings
        embeddings = self.dropout(embeddings)
        embeddings = self.LayerNorm(embeddings)
        return embeddings


class BigBirdPooler(Linear):
    """A linear layer of the base model itself, and its activation."""

    segment = Pooler.segment
    is_read = True
    """A loss reads what it gives."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        super().__init__(hidden, hidden, bias=True)

    def forward(self, x: Handle) -> Handle:
        pooled_output = super().forward(first_token(x))
        return activated(pooled_output, Activation.TANH)


class BigBirdClassificationHead(ClassificationHead):
    def add_activation(self, config: ConfigReader) -> None:
        self.activation = read_activation(config, "hidden_act")


class BigBirdForSequenceClassification(HeadClassification):
    head_class: Callable[[ConfigReader, EncoderTask], ClassificationHead] = (
        BigBirdClassificationHead
    )


class BigBirdForQuestionAnsweringHead(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.dropout = Dropout(config.number("hidden_dropout_prob"))
        self.intermediate, self.output = Intermediate(config), Output(config)
        self.qa_outputs = Linear(config.integer("hidden_size"), 2, bias=True)

    def forward(self, encoder_output: Handle) -> Handle:
        x = self.dropout(encoder_output)
        x = self.intermediate(x)
        x = self.output(x, encoder_output)
        x = self.qa_outputs(x)
        return x


class BigBirdForQuestionAnswering(EncoderTask):
    """Where an answer begins and ends, which is not in the question."""

    outputs = 2

    def add_head(self, config: ConfigReader) -> None:
        self.qa_classifier = BigBirdForQuestionAnsweringHead(config)
        base = self.encoder
        assert isinstance(base, BertModel)
        del base.children["pooler"]
        base.pooler = None

    def loss_of(self, outputs: Encoded) -> Tensor:
        run, x = self.run, outputs.last_hidden_state
        logits_mask = made_by(run, OperationKind.WHERE, (*x.shape[:2], 1), DType.INT64)
        logits = self.qa_classifier(x)
        logits = logits - logits_mask.apart(OperationKind.MUL_SCALAR, dtype=DType.FP32)
        return span_loss(run, logits.record, 2)


class BigBirdModel(BertModel):
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: BertModel.tasks[Task.MASKED_LM],
        Task.BASE: BertModel.tasks[Task.BASE],
        Task.SEQUENCE_CLASSIFICATION: BigBirdForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: BertModel.tasks[Task.TOKEN_CLASSIFICATION],
        Task.QUESTION_ANSWERING: BigBirdForQuestionAnswering,
        Task.MULTIPLE_CHOICE: PooledMultipleChoice,
        Task.PRETRAINING: BertForPreTraining,
    }
    eager_only = True
    always_pools = True
    embeddings_class: Callable[[ConfigReader], Module] = BigBirdEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = BigBirdEncoder
    pooler_class: Callable[[ConfigReader], Module] = BigBirdPooler

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        self.sizes = read_blocks(config)
        super().__init__(config, pooled=pooled)
        self.unpadding = Unpadding()

    def forward(self, batch: int, length: int) -> Encoded:
        sequence_output = self.encoded(batch, length)
        pooled_output = self.pooled(sequence_output)
        sequence_output = self.unpadding.of(sequence_output, length)
        return Encoded(sequence_output, pooled_output)

    def encoded(self, batch: int, length: int) -> Handle:
        """What the encoder makes of all tokens, those that pad them too; then its other names are gone."""
        run, kinds = self.run, OperationKind
        input_ids = token_type_ids = None
        attention_mask = made_by(run, kinds.ONES, (batch, length), DType.FP32)
        padded = None if self.sizes is None else self.sizes.padded(length)
        whole = batch, padded or length
        if whole[1] != length:
            input_ids = made_by(run, kinds.PAD, whole, DType.INT64)
            attention_mask = attention_mask.apart(kinds.PAD, shape=whole)
            token_type_ids = made_by(run, kinds.PAD, whole, DType.INT64)
        embedding_output = self.embeddings(*whole, token_type_ids, input_ids)
        beside: tuple[Handle | None, ...]
        if padded is None or self.sizes is None:
            beside = (written_mask(attention_mask, embedding_output),)
        else:
            beside = None, *create_masks(attention_mask, self.sizes.block)
        del attention_mask
        made: Handle = self.encoder(embedding_output, *beside)
        return made
