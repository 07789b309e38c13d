"""Keys and values that stand for windows of tokens, and the choice among them (DeepSeek-V4).

An entry is the weighted sum of its window's states, the weights a softmax of gates over the window, in fp32.
Where windows overlap each also has the one before, by projections of its own. The indexer compresses once more,
in narrower heads, and scores every token's queries with the entries; nothing that is chosen has a gradient.

(transformers 5.23, models/deepseek_v4/modeling_deepseek_v4.py)
"""

from memplan.classes.mixed.deepseek import places_of_best
from memplan.classes.mixed.sinks import HalfRotaryEmbedding
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Linear, UpcastRMSNorm
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import (
    fill,
    made_from,
    masked_fill,
    softmax,
    spread,
    summed_over,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import counted_positions
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate, rotate_half
from memplan.graph.modules.unread import UnreadGraph
from memplan.model.config import ConfigReader


def apply_rotary_pos_emb(x: Handle, cos: Handle, sin: Handle) -> Handle:
    """The last numbers of each head, in fp32, by tables that are repeated in each call."""
    cos = twice(cos).unsqueeze(1)
    sin = twice(sin).unsqueeze(1)
    rope_dim = cos.shape[-1]
    nope, rope = x.narrow(x.shape[-1] - rope_dim), x.narrow(rope_dim)
    rotated = ((rope.float() * cos) + (rotate_half(rope).float() * sin)).to(x.dtype)
    return concatenate(nope, rotated)


def twice(table: Handle) -> Handle:
    """``table.repeat_interleave(2, dim=-1)``."""
    shape = *table.shape[:-1], 2 * table.shape[-1]
    return made_from(OperationKind.REPEAT_INTERLEAVE, shape, table.dtype, table)


class BothRotaryEmbedding(HalfRotaryEmbedding):
    """A module that keeps frequencies of both kinds of layers and is called once."""

    def hold_frequencies(self, width: int) -> None:
        """Both."""
        super().hold_frequencies(width)
        super().hold_frequencies(width)


class DeepseekV4HCACompressor(Module):
    """An entry for each window (``DeepseekV4HCACompressor``)."""

    rotary_class: type[HalfRotaryEmbedding] = BothRotaryEmbedding
    overlaps = 1
    """Windows of which an entry is made."""

    def __init__(self, config: ConfigReader, head_dim: int, rate: int, rotated: int) -> None:
        hidden, width = config.integer("hidden_size"), self.overlaps * head_dim
        self.compress_rate, self.head_dim = rate, head_dim
        self.kv_proj = Linear(hidden, width)
        self.gate_proj = Linear(hidden, width)
        self.position_bias = Weight(rate, width)
        self.kv_norm = UpcastRMSNorm(head_dim)
        self.rotary_emb = self.rotary_class(rotated)

    def entries(self, x: Handle) -> tuple[Handle, list[Handle]]:
        """One for each whole window, and what the caller's variables hold.

        A sequence that is shorter than a window is counted as one that fills it.
        """
        batch, length, _ = x.shape
        kv = self.kv_proj(x)
        gate = self.gate_proj(x)
        n_windows = max(length // self.compress_rate, 1)
        usable, shape = n_windows * self.compress_rate, (batch, n_windows, self.compress_rate, -1)
        chunk_kv, chunk_gate = kv.narrow(usable, dim=1), gate.narrow(usable, dim=1)
        chunk_kv = chunk_kv.view(*shape)
        chunk_gate = chunk_gate.view(*shape) + self.operand(self.position_bias)
        new_kv, new_gate = self.overlapped(chunk_kv), self.overlapped(chunk_gate)
        compressed = self.kv_norm(weighted_sum(new_kv, new_gate))
        positions = counted_positions(self.run, n_windows)
        positions = positions.apart(OperationKind.MUL_SCALAR).apart(OperationKind.ADD_SCALAR)
        cos, sin = self.rotary_emb(compressed, spread(positions.unsqueeze(0), (batch, n_windows)))
        compressed = apply_rotary_pos_emb(compressed.unsqueeze(1), cos, sin)
        held = [kv, gate, chunk_kv, chunk_gate, new_kv, new_gate, positions, cos, sin]
        return compressed, held

    def overlapped(self, chunk: Handle) -> Handle:
        """What an entry is made of."""
        return chunk

    def forward(self, x: Handle, q_residual: Handle, positions: Handle) -> tuple[Handle, Handle]:  # noqa: ARG002
        """The entries, and which of them each token may see."""
        compressed_kv, _held = self.entries(x)
        (batch, length, _), count = x.shape, compressed_kv.shape[2]
        entry_indices = counted_positions(self.run, count)
        causal_threshold = threshold(positions)
        block_bias = blank(compressed_kv, (batch, 1, length, count))
        block_bias = block_bias.apart(
            OperationKind.MASKED_FILL, later(entry_indices, causal_threshold)
        )
        return compressed_kv, block_bias


def weighted_sum(kv: Handle, gate: Handle) -> Handle:
    """``(kv * gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)).sum(dim=2)``."""
    return summed_over(kv * softmax(gate, dtype=DType.FP32).to(kv.dtype), 2)


def blank(like: Handle, shape: tuple[int, ...]) -> Handle:
    """``like.new_zeros(shape)``, or full of another number."""
    return made_by(like.run, OperationKind.ZEROS, shape, like.dtype)


def threshold(positions: Handle) -> Handle:
    """``(position_ids + 1) // compress_rate``."""
    return positions.apart(OperationKind.ADD_SCALAR).apart(OperationKind.FLOOR_DIVIDE)


def later(entry_indices: Handle, causal_threshold: Handle) -> Handle:
    """Which entries are not there yet, for each token."""
    shape = causal_threshold.numel, entry_indices.numel
    return made_from(OperationKind.GE, shape, DType.BOOL, entry_indices, causal_threshold)


class OverlappingCompressor(DeepseekV4HCACompressor):
    """Each entry is made of its window's states and of others of the window before."""

    overlaps = 2

    def overlapped(self, chunk: Handle) -> Handle:
        """The window's behind those of the one before, copied into blanks."""
        batch, n_windows, ratio, _ = chunk.shape
        new = blank(chunk, (batch, n_windows, 2 * ratio, self.head_dim))
        new = fill(new, chunk.narrow(self.head_dim))
        if n_windows > 1:
            new = fill(new, chunk.narrow(n_windows - 1, dim=1).narrow(self.head_dim))
        return new


class DeepseekV4IndexerScorer(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.weights_proj = Linear(config.integer("hidden_size"), config.integer("index_n_heads"))

    def forward(self, q: Handle, compressed_kv: Handle, x: Handle) -> Handle:
        scores = matmul(q.float(), compressed_kv.transpose(-1, -2).float())
        scores = scores.unary(OperationKind.RELU) * 1.0
        weights = self.weights_proj(x).float() * 1.0
        return summed_over(scores * weights.unsqueeze(-1), 2)


class DeepseekV4Indexer(OverlappingCompressor):
    rotary_class = HalfRotaryEmbedding

    def __init__(self, config: ConfigReader, rate: int, rotated: int) -> None:
        super().__init__(config, config.integer("index_head_dim"), rate, rotated)
        self.num_heads = config.integer("index_n_heads")
        self.index_topk = config.integer("index_topk")
        self.q_b_proj = Linear(config.integer("q_lora_rank"), self.num_heads * self.head_dim)
        self.scorer = DeepseekV4IndexerScorer(config)

    def __call__(self, *args: Handle) -> Handle:
        """Nothing of it has a gradient: what its operations keep stays until it returns."""
        graph = UnreadGraph(self.run)
        with graph:
            made: Handle = super().__call__(*args)
        for weight in self.parameters():
            self.run.parameters[weight].unused = True
        return made

    def forward(self, x: Handle, q_residual: Handle, positions: Handle) -> Handle:  # type: ignore[override]
        """The entries that each token attends to."""
        batch, length, _ = x.shape
        compressed_kv, _held = self.entries(x)
        cos_q, sin_q = self.rotary_emb(x, positions)
        q = self.q_b_proj(q_residual).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(q, cos_q, sin_q).transpose(1, 2)
        index_scores = self.scorer(q, compressed_kv, x)
        top_k = min(self.index_topk, compressed_kv.shape[2])
        causal_threshold = threshold(positions)
        entry_indices = counted_positions(self.run, compressed_kv.shape[2])
        future_mask = later(entry_indices, causal_threshold)
        index_scores = masked_fill(index_scores, future_mask)
        top_k_indices = places_of_best(index_scores, top_k)
        invalid = top_k_indices.apart(OperationKind.GE, dtype=DType.BOOL)
        return chosen_where(invalid, top_k_indices)


def chosen_where(mask: Handle, indices: Handle) -> Handle:
    """``torch.where(mask, ..., indices)`` with a number in the place of those that are masked."""
    filled = made_by(mask.run, OperationKind.ZEROS, indices.shape, indices.dtype)
    return made_from(OperationKind.WHERE, indices.shape, indices.dtype, mask, filled, indices)


class DeepseekV4CSACompressor(OverlappingCompressor):
    def __init__(self, config: ConfigReader, head_dim: int, rate: int, rotated: int) -> None:
        super().__init__(config, head_dim, rate, rotated)
        self.indexer = DeepseekV4Indexer(config, rate, rotated)

    def forward(self, x: Handle, q_residual: Handle, positions: Handle) -> tuple[Handle, Handle]:
        compressed_kv, _held = self.entries(x)
        (batch, length, _), count = x.shape, compressed_kv.shape[2]
        top_k_indices = self.indexer(x, q_residual, positions)
        valid = top_k_indices.apart(OperationKind.GE, dtype=DType.BOOL)
        safe_indices = chosen_where(valid, top_k_indices)
        shape = batch, 1, length, count + 1
        block_bias = made_from(OperationKind.SCATTER, shape, compressed_kv.dtype, safe_indices)
        return compressed_kv, block_bias.narrow(count)
