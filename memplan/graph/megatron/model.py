"""A decoder as Megatron-core runs it: ``GPTModel`` of one tensor-parallel rank.

Megatron-core 0.16.1, core/models/gpt/gpt_model.py, core/models/common/embeddings, core/transformer/transformer_block.py,
core/tensor_parallel/layers.py (``VocabParallelEmbedding``). What a model's config says of transformers' own class beyond its
sizes is not looked at; what Megatron has no module for is refused by name.
"""

from collections.abc import Iterator
from typing import NamedTuple

from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.megatron.backends import backend_of
from memplan.graph.megatron.config import MegatronModule, Part, TransformerConfig
from memplan.graph.megatron.layers import ColumnParallelLinear, Norm
from memplan.graph.megatron.local_sizes import check_model, padded_vocabulary
from memplan.graph.modules.basic import dropout
from memplan.graph.modules.functional import masked_fill_in_place
from memplan.graph.modules.fused import megatron
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.interpreter import undisturbed
from memplan.graph.modules.layer_list import LayerList, LayerRun
from memplan.graph.modules.module import Module, Site
from memplan.graph.modules.run import Run
from memplan.graph.modules.stages import receive
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, StackSpec
from memplan.model.parameters import ModelPart
from memplan.model.spec import ModelSpec
from memplan.training.splitting.megatron import (
    MegatronLayers,
    RecomputeGranularity,
    RecomputeMethod,
)
from memplan.training.splitting.parallelism import StagePlace


def record_megatron(model: ModelSpec, options: TapeOptions, settings: MegatronLayers) -> Tape:
    """Write one rank's training step on a new tape.

    Raises ``SetupError`` for a model that Megatron has no modules for, and for a degree that does not
    divide a size, with the arithmetic.
    """
    group = options.tensor_parallel
    degree = 1 if group is None else group.degree
    check_model(model, options, degree=degree, sequence=group is not None and group.sequence)
    place = options.stage or StagePlace(is_first=True, is_last=True)
    built = GPTModel(TransformerConfig.of(model, options, settings), model, place)
    with undisturbed():
        run = Run(options, source=model.source)
        built.attach(Site())
        built.site.run = run
        run.layers = {"decoder": built.decoder.layers.first_specs}
        run.inputs = _input_blocks(run)
        _forward_step(run, built, place)
        run.close()
        del built.site.run  # or the modules would hold the tape
    return run


def _input_blocks(t: Tape) -> list[int]:
    """Ids, positions, labels and the loss's mask [bytes]; of a pipeline each stage fetches some of them."""
    tokens = t.options.batch_size * t.options.seq_len
    ids, mask = (t.tensor(tokens, dtype) for dtype in (DType.INT64, DType.FP32))
    return [*3 * [ids.storage.num_bytes], mask.storage.num_bytes]


def _forward_step(run: Run, built: "GPTModel", place: StagePlace) -> None:
    """Of the last stage the mean of all tokens' losses."""
    received = None
    if not place.is_first:
        batch, length, width = run.options.batch_size, run.options.seq_len, built.config.hidden_size
        received = receive(run, length, batch, width, sequence=0)
    output = built(received)
    if place.is_last:
        output = Handle(run, run.mean(output.record, output.numel), (1,))
    if run.segment.output is None:
        run.finish(output.record)


class GPTModel(MegatronModule):
    def __init__(self, config: TransformerConfig, model: ModelSpec, place: StagePlace) -> None:
        self.config, self.place, stack = config, place, model.stacks[0]
        degree = config.degree
        rows = padded_vocabulary(model, config.settings, degree) // degree
        rotates = _rotary_dim(stack)
        if place.is_first:
            assert stack.embedding is not None
            self.embedding = LanguageModelEmbedding(
                config, stack.embedding, rows, learned=not rotates
            )
        self.rotary_pos_emb = RotaryEmbedding(rotates)
        self.decoder = TransformerBlock(config, stack, place)
        if place.is_last:
            self.output_layer = ColumnParallelLinear(config, config.hidden_size, rows)
            self.output_layer.segment = "head", ModelPart.HEAD
            if model.head.tied:
                self.output_layer.weight = self.embedding.word_embeddings.weight

    def forward(self, decoder_input: Handle | None) -> Handle:
        """Hidden states, or the loss of every token; ``decoder_input``: what the stage before sends."""
        if decoder_input is None:
            self.run.start("embedding", None, part=ModelPart.EMBEDDING)
            decoder_input = self.embedding()
        rotary_pos_emb = self.rotary_pos_emb()
        hidden_states: Handle = self.decoder(decoder_input, rotary_pos_emb)
        if not self.place.is_last:
            return hidden_states
        logits, _ = self.output_layer(hidden_states)
        return self.compute_language_model_loss(logits)

    def compute_language_model_loss(self, logits: Handle) -> Handle:
        """Megatron's own cross-entropy widens the logits to fp32, TransformerEngine's does not."""
        if not megatron.is_by_engine(self.config.settings):
            logits = logits.float()
        return megatron.cross_entropy(logits).transpose(0, 1).contiguous()


def _rotary_dim(stack: StackSpec) -> int:
    """Dimensions of a head that are turned; 0 where positions are learned."""
    for run in stack.runs:
        spec = run.layer.attention
        if isinstance(spec, AttentionSpec | LatentAttentionSpec) and spec.rotary is not None:
            return spec.rotary.dim
    return 0


class RotaryEmbedding(MegatronModule):
    def __init__(self, dim: int) -> None:
        self.dim = dim

    def forward(self) -> Handle | None:
        """Angles of every position, in fp32, which it remembers beside its frequencies."""
        if not self.dim:
            return None
        run, length = self.run, self.run.options.seq_len
        run.buffer(self.dim // 2, DType.FP32)
        angles = run.buffer(length * self.dim, DType.FP32)
        return Handle(run, angles, (length, 1, 1, self.dim))


class Embedding(MegatronModule):
    """``torch.nn.Embedding``."""

    def __init__(self, num_rows: int, width: int, ranks: int = 1) -> None:
        self.weight = Part(num_rows, width, ranks=ranks)

    def forward(self) -> Handle:
        """Of a batch's tokens; of ids that the batch itself has nothing is told."""
        return self.looked_up(None)

    def looked_up(self, ids: Handle | None) -> Handle:
        shape = self.run.options.batch_size, self.run.options.seq_len
        return megatron.looked_up(self.operand(self.weight), shape, ids)


class VocabParallelEmbedding(Embedding):
    """This rank's rows of the table, and zeros for ids that are others'; added up over ranks."""

    def __init__(self, num_rows: int, width: int, ranks: int, *, reduce_scatter: bool) -> None:
        super().__init__(num_rows, width, ranks)
        self.reduce_scatter_embeddings = reduce_scatter

    def forward(self) -> Handle:
        """Whole, or (tokens, sequences, width) of which each rank has a share."""
        options, tp_size = self.run.options, self.weight.ranks
        if tp_size == 1:
            return self.looked_up(None)
        shape = options.batch_size, options.seq_len
        input_mask, masked_input = megatron.own_ids(self.run, shape)
        output_parallel = self.looked_up(masked_input)
        output_parallel = masked_fill_in_place(output_parallel, input_mask)
        if not self.reduce_scatter_embeddings:
            return megatron.all_reduced(output_parallel)
        output_parallel = output_parallel.transpose(0, 1).contiguous()
        return megatron.scattered(output_parallel, tp_size)


class LanguageModelEmbedding(MegatronModule):
    """Tokens, learned positions, dropout.

    With sequence parallelism the sum over ranks is scattered at once, or, with learned positions, cut and copied.
    """

    def __init__(
        self, config: TransformerConfig, spec: EmbeddingSpec, rows: int, *, learned: bool
    ) -> None:
        self.dropout, self.adds_positions = spec.dropout, learned
        self.config = config
        self.word_embeddings = VocabParallelEmbedding(
            rows, config.hidden_size, config.degree, reduce_scatter=config.sequence and not learned
        )
        if learned:
            self.position_embeddings = Embedding(spec.num_positions, config.hidden_size)

    def forward(self) -> Handle:
        """(tokens, sequences, width)."""
        self.register()
        word_embeddings = self.word_embeddings()
        if self.adds_positions:
            position_embeddings = self.position_embeddings()
            embeddings = word_embeddings + position_embeddings
        else:
            embeddings = word_embeddings
        if not self.word_embeddings.reduce_scatter_embeddings:
            embeddings = embeddings.transpose(0, 1).contiguous()
            if self.config.sequence:
                # A slice, cloned lest it hold the whole; its gradient is gathered.
                share = embeddings.shape[0] // self.config.degree, *embeddings.shape[1:]
                embeddings = megatron.exchanged(OperationKind.CLONE, embeddings, share)
        embeddings = dropout(embeddings, self.dropout)
        return embeddings


class TransformerBlock(MegatronModule):
    begins_names = True

    def __init__(self, config: TransformerConfig, stack: StackSpec, place: StagePlace) -> None:
        self.layers = Layers(config, stack)
        self.is_last = place.is_last
        if place.is_last:
            assert stack.final_norm is not None
            self.final_layernorm = Norm(stack.final_norm, config.hidden_size)
            self.final_layernorm.segment = "decoder.final_layernorm", ModelPart.NORM

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Handle:
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotary_pos_emb)
            layer.segment.nested = layer.segment.checkpointed
        if self.is_last:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states


class Stretch(NamedTuple):
    """Layers that are one segment: those that are recomputed together."""

    specs: tuple[LayerSpec, ...]
    recomputed: bool


class Layers(LayerList):
    """Of which equal stretches are recorded once."""

    recomputes = False  # as Megatron's own settings say

    def __init__(self, config: TransformerConfig, stack: StackSpec) -> None:
        specs = [run.layer for run in stack.runs for _ in range(run.count)]
        stretches = list(_stretches(config.settings, specs))
        self.first_specs = [each.specs[0] for each in stretches]
        super().__init__("decoder.layers", stretches, lambda each: _made(config, each))

    def runs(self) -> Iterator[LayerRun]:
        """Those that are recomputed, and the others."""
        for each in super().runs():
            assert isinstance(each.kind, Stretch)
            yield replace(each, checkpointed=each.kind.recomputed)


def _stretches(settings: MegatronLayers, specs: list[LayerSpec]) -> Iterator[Stretch]:
    at = 0
    while at < len(specs):
        size, recomputed = 1, False
        if settings.recompute_granularity is RecomputeGranularity.FULL:
            count = settings.recompute_num_layers
            is_uniform = settings.recompute_method is RecomputeMethod.UNIFORM
            size, recomputed = (count, True) if is_uniform else (1, at < count)
        yield Stretch(tuple(specs[at : at + size]), recomputed)
        at += size


def _made(config: TransformerConfig, stretch: Stretch) -> Module:
    layers = [_layer(config, each) for each in stretch.specs]
    return layers[0] if len(layers) == 1 else Chunk(layers)


def _layer(config: TransformerConfig, spec: LayerSpec) -> Module:
    backend = backend_of(
        config.settings, shares_sequences=config.context > 1,
        is_latent=isinstance(spec.attention, LatentAttentionSpec),
    )  # fmt: skip
    layer: Module = backend.layer(config, spec, backend)
    return layer


class Chunk(MegatronModule):
    """Layers that are recomputed together."""

    def __init__(self, layers: list[Module]) -> None:
        for number, layer in enumerate(layers):
            setattr(self, str(number), layer)

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Handle:
        """One after another."""
        for layer in self.children.values():
            hidden_states = layer(hidden_states, rotary_pos_emb)
        return hidden_states
