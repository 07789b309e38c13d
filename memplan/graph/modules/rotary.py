"""Rotary positions on handles: tables, and the functions that turn queries and keys by them.

(transformers 5.23, models/llama/modeling_llama.py: ``LlamaRotaryEmbedding``, ``apply_rotary_pos_emb``)
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.modules.handles import ComplexHandle, Handle, empty, made_by
from memplan.graph.modules.layouts import Settled, unchanged
from memplan.graph.modules.module import Module
from memplan.graph.modules.strides import dense_strides
from memplan.graph.operations.rotary import complex_table, rotary_as_complex, rotary_in_place
from memplan.training.choices_of_kernels.kernels import RotaryKernel

Tables = tuple[Handle, Handle]
"""Cosines and sines of (1 or batch, tokens, width)."""
Turn = Callable[[Handle, Handle, Handle, Handle], Tables]


class RotaryEmbedding(Module):
    """``LlamaRotaryEmbedding``: made in fp32 and cast."""

    def __init__(self, width: int) -> None:
        self.width = width

    switches = False
    """It has frequencies for long sequences beside those for short ones."""

    def width_of(self, window: int | None) -> int:  # noqa: ARG002
        """Columns that are turned in layers with this window."""
        return self.width

    def forward(self, x: Handle, positions: Handle, window: int | None = None) -> Tables:
        """Of all positions, in the format of ``x``."""
        run, width = self.run, self.width_of(window)
        self.hold_frequencies(width)
        if self.switches:
            self.switch(positions, width)
        rows, length = positions.shape
        if run.kernels.rotary is RotaryKernel.COMPLEX:
            table = complex_table(run, rows * length, width)
            whole = ComplexHandle(run, table, (rows, length, width))
            return whole, whole
        angles = rows, length, (width + 1) // 2
        counted = positions.float().view(rows, length, 1)
        freqs = counted.apart(OperationKind.MUL, shape=angles)
        del counted
        emb = self.doubled(freqs, width)
        cos = _scaled(emb, OperationKind.COS)
        sin = _scaled(emb, OperationKind.SIN)
        return self.cast(cos, x), self.cast(sin, x)

    def switch(self, positions: Handle, width: int) -> None:
        """``longrope_frequency_update``: which frequencies these positions have; the first pass makes the long ones.

        (transformers 5.23, modeling_rope_utils.py)
        """
        run, kinds = self.run, OperationKind
        if not run.decomposed and run.options.quantizer is None:
            run.buffer(
                width // 2, DType.FP32, loaded=(0, DType.FP32), behind=not run.segment.is_layer
            )
        seq_len = made_by(run, kinds.MAX, (1,), positions.dtype).apart(kinds.ADD_SCALAR)
        inv_freq = seq_len.apart(kinds.GT, dtype=DType.BOOL).apart(
            kinds.WHERE, dtype=DType.FP32, shape=(width // 2,)
        )
        del seq_len, inv_freq

    def doubled(self, freqs: Handle, width: int) -> Handle:
        """``torch.cat((freqs, freqs), dim=-1)``."""
        return freqs.apart(OperationKind.CAT, shape=(*freqs.shape[:-1], width))

    def cast(self, table: Handle, x: Handle) -> Handle:
        """To the format of the hidden states."""
        return table.to(x.dtype)

    def hold_frequencies(self, width: int) -> None:
        """``inv_freq`` and ``original_inv_freq``: as small as they are, they hold a segment of the
        allocator's where ZeRO gives all weights around them back.

        Behind the layers, as ``rotary_emb`` stands. Left out beside a quantized base, whose loader brings
        them in an order of its own.
        """
        run = self.run
        if not run.decomposed and run.options.quantizer is None:
            for _ in range(2):
                run.buffer(width // 2, DType.FP32, behind=not run.segment.is_layer)


class SectionedRotaryEmbedding(RotaryEmbedding):
    """Tables of time, height and width for each sequence, of which one is put together.

    (transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py, ``Qwen2VLRotaryEmbedding``)
    """

    def forward(self, x: Handle, positions: Handle | None, window: int | None = None) -> Tables:
        """Of all positions, in the format of ``x``."""
        del positions, window
        run, (batch, length, _) = self.run, x.shape
        self.hold_frequencies(self.width)
        shape = 3 * batch, length, self.width // 2
        position_ids = made_by(run, OperationKind.TO, (*shape[:2], 1), DType.FP32)
        freqs = position_ids.apart(OperationKind.MUL, shape=shape)
        del position_ids
        cos = _scaled(freqs, OperationKind.COS)
        sin = _scaled(freqs, OperationKind.SIN)
        sin = self.recomposed(sin)
        cos = self.recomposed(cos)
        return self.cast(cos, x), self.cast(sin, x)

    def recomposed(self, freq: Handle) -> Handle:
        """Sections of the three side by side, each number twice (``recomposition_frequencies``)."""
        batch, length, half = freq.shape[0] // 3, *freq.shape[1:]
        joined = empty(freq.run, (batch, length, half), DType.FP32)
        freq.run.record(OperationKind.CAT, (freq.record,), (joined.record,))
        return self.doubled(joined, self.width)


def _scaled(angles: Handle, kind: OperationKind) -> Handle:
    """``angles.cos() * self.attention_scaling``: what is not scaled yet goes once it is."""
    run, made = angles.run, empty(angles.run, angles.shape, angles.dtype)
    scratch = made.record.storage.num_bytes, RESULT
    run.record(kind, (angles.record,), (made.record,), forward_scratch_bytes=scratch)
    return made


def turn_function(kernel: RotaryKernel, own: Turn) -> Turn:
    """What turns queries and keys: the class's ``own`` function, or what a package puts in its place."""
    return own if kernel is RotaryKernel.EAGER else _FUNCTIONS[kernel]


def apply_rotary(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """``apply_rotary_pos_emb``."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turned_query = (query * cos) + (rotate_half(query) * sin)
    turned_key = (key * cos) + (rotate_half(key) * sin)
    return turned_query, turned_key


def apply_rotary_in_fp32(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """Of copies in fp32, cast back."""
    dtype = query.dtype
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    q_embed = (query.float() * cos) + (rotate_half(query.float()) * sin)
    k_embed = (key.float() * cos) + (rotate_half(key.float()) * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


def apply_rotary_to_part(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """The same of the first columns of each head, joined with the rest (models/glm/modeling_glm.py)."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turning, rest = cut(query, cos)
    turning_key, rest_key = cut(key, cos)
    turned_query = (turning * cos) + (rotate_half(turning) * sin)
    turned_key = (turning_key * cos) + (rotate_half(turning_key) * sin)
    turned_query = concatenate(turned_query, rest)
    turned_key = concatenate(turned_key, rest_key)
    return turned_query, turned_key


def repeated(table: Handle) -> Handle:
    """The first half of each row, every number twice: made anew in each layer (GLM, Helium)."""
    return table.apart(OperationKind.REPEAT_INTERLEAVE)


def cut(x: Handle, table: Handle) -> Tables:
    """The columns of heads that tables turn, and those that pass."""
    width = table.shape[-1]
    return x.narrow(width), x.narrow(x.shape[-1] - width)


def rotate_half(x: Handle) -> Handle:
    """Halves change places, the second one with another sign; neighbours in pairs take as much."""
    width = x.shape[-1]
    first = x.narrow(width // 2)
    second = x.narrow(width - width // 2)
    return concatenate(-second, first)


def concatenate(*parts: Handle, dim: int = -1) -> Handle:
    """``torch.cat``: it gives rows, whatever its inputs' strides."""
    run, shape = parts[0].run, list(parts[0].shape)
    shape[dim] = sum(each.shape[dim] for each in parts)
    made = Handle(run, run.concatenate(*(each.record for each in parts)), tuple(shape))
    for each in parts:
        each.leads_to(made, unchanged)
    return made


def turned_in_place(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """Liger's: where they lie, and their gradients too where these lie as they did."""
    return _in_place(query, cos, sin, keeps=True), _in_place(key, cos, sin, keeps=True)


def turned_into_copies(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """Unsloth's: the same in forward; in backward into new tensors."""
    return _in_place(query, cos, sin, keeps=False), _in_place(key, cos, sin, keeps=False)


def _in_place(x: Handle, cos: Handle, sin: Handle, *, keeps: bool) -> Handle:
    """One of them; ``keeps``: a gradient that lies as it did is written over, another one copied first."""
    run, right = x.run, dense_strides(x.shape, x.strides)
    made = rotary_in_place(run, x.laid(), cos.record, sin.record, by_row=keeps)
    settles = Settled(run.segment.operations[-1], Gradient.ALIAS, right) if keeps else None
    return x.leads_to(Handle(run, made, x.shape, x.strides), lambda _: right, settles)


def turned_as_complex(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """torchtitan's: fp32 copies times a table of complex numbers, cast back."""
    del sin
    if cos.shape[-1] < query.shape[-1]:
        turning, rest = cut(query, cos)
        turning_key, rest_key = cut(key, cos)
        made = turned_as_complex(turning, turning_key, cos, cos)
        return concatenate(made[0], rest), concatenate(made[1], rest_key)
    turned = rotary_as_complex(query.run, query.record, key.record, cos.record)
    return query.like(turned[0]), key.like(turned[1])


_FUNCTIONS: dict[RotaryKernel, Turn] = {
    RotaryKernel.LIGER: turned_in_place,
    RotaryKernel.UNSLOTH: turned_into_copies,
    RotaryKernel.COMPLEX: turned_as_complex,
}
