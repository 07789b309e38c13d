"""TransformerEngine's functions: norm and product in one, products in 16 bits or 8, fused rotary embeddings.

TransformerEngine 2.11, pytorch/module/layernorm_linear.py (``_LayerNormLinear``), linear.py (``_Linear``), attention/rope.py
(``FusedRoPEFunc``); Megatron-core 0.16.1, core/fusions/fused_mla_yarn_rope_apply.py. Userbuffers (``tp_comm_overlap``) are off.
"""

from collections.abc import Sequence

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.megatron import (
    column_sends,
    product,
    row_sends,
    sequence_ranks,
    statistics_of,
    weight_gradient,
)
from memplan.graph.operations.narrow import Narrow, narrow_formats, narrow_product, narrow_sends


def norm_product(
    t: Tape,
    x: Tensor,
    norms: Sequence[Parameter],
    weight: Parameter,
    bias: Parameter | None = None,
) -> Tensor:
    """Keeps its input, the normed input and its statistics, which are this rank's share.

    With sequence parallelism the normed input is gathered for the product, and in backward again; the whole input gradient
    stays until the function returns. In 8 bits the normed input is there as codes alone, or in 16 bits until their scale is
    known.
    """
    columns, width = weight.shape
    ranks, own = sequence_ranks(t), x.storage.num_bytes
    rows, whole = x.numel // width * ranks, own * ranks
    sends, formats = column_sends(t, rows * width), narrow_formats(t)
    forward, backward = [whole] * (ranks > 1), [whole]
    if formats is None:
        kept = t.tensor(x.numel, x.dtype)
        if ranks > 1:
            backward += [whole, own, ~0]
    else:
        narrow, share = Narrow(t, formats, weight), rows // ranks
        kept, sends = narrow.kept(share, again=ranks > 1), narrow_sends(t, formats, sends)
        forward = [own] * formats.scales_first + narrow.quantized(share, again=ranks > 1)
        backward = [*narrow.gradient(rows), whole]
        if ranks > 1:
            forward += narrow.gathered(rows)
            backward = [*narrow.gradient(rows), *narrow.gathered_back(rows), whole, own]
    statistics = statistics_of(t, x, norms)
    out = t.tensor(rows * columns, t.compute)
    inputs: tuple[Tensor, ...] = (x, *norms, weight)
    gradients: tuple[int, ...] = (Gradient.FRESH,) * (1 + len(norms)) + (weight_gradient(t),)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (kept, *statistics, out), saves=(x, kept, *statistics, weight),
        gradients=gradients, forward_scratch_bytes=(*forward, RESULT) if forward else (),
        backward_scratch_bytes=(*backward, RESULT), flops=2 * rows * width * columns,
        in_python=True, sends=sends,
    )  # fmt: skip
    return out


def column_product(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """With this rank's columns, of what was normed elsewhere."""
    columns, width = weight.shape
    ranks, formats = sequence_ranks(t), narrow_formats(t)
    rows, whole = x.numel // width * ranks, x.storage.num_bytes * ranks
    sends = column_sends(t, rows * width)
    if formats is not None:
        return narrow_product(
            t, formats, x, weight, rows, backward=(whole,) * (ranks > 1), sends=sends,
            gathered_rows=rows if ranks > 1 else 0,
        )  # fmt: skip
    if ranks == 1:
        return product(t, x, weight, rows, sends=sends)
    return product(t, x, weight, rows, forward=(whole,), backward=(whole, whole), sends=sends)


def row_product(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """With this rank's rows, added up; with sequence parallelism its gradient is gathered first."""
    columns, width = weight.shape
    ranks, formats, tokens = sequence_ranks(t), narrow_formats(t), x.numel // width
    whole = (allocated_bytes(tokens * columns, t.compute),) * (ranks > 1)
    rows, sends = tokens // ranks, row_sends(t, tokens * columns)
    if formats is not None:
        return narrow_product(t, formats, x, weight, rows, forward=whole, sends=sends)
    return product(t, x, weight, rows, forward=whole, backward=whole, sends=sends)


def own_product(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Of a rank's own rows, with a weight that it has whole, or with those of its experts."""
    formats, rows = narrow_formats(t), x.numel // weight.shape[1]
    if formats is not None:
        return narrow_product(t, formats, x, weight, rows)
    return product(t, x, weight, rows)


def turned(t: Tape, x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embeddings: one kernel into a new tensor, which keeps the angles alone."""
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.ROTARY, (x, angles), (out,), saves=(angles,),
        gradients=(Gradient.FRESH, Gradient.NONE), in_python=True,
    )  # fmt: skip
    return out


def turned_in_place(t: Tape, query: Tensor) -> Tensor:
    """Latent attention's queries where they lie, and their gradient too."""
    out = t.view(query, query.numel)
    t.record(OperationKind.ROTARY, (query,), (out,), gradients=(Gradient.ALIAS,), in_python=True)
    return out


def keys_and_values(
    t: Tape, wide: Tensor, position: Tensor, key_numel: int, value_numel: int
) -> tuple[Tensor, Tensor]:
    """Latent attention's, laid out anew, the keys with what is turned of them."""
    key, value = t.tensor(key_numel, t.compute), t.tensor(value_numel, t.compute)
    t.record(
        OperationKind.ROTARY, (wide, position), (key, value),
        gradients=(Gradient.FRESH, Gradient.FRESH), in_python=True,
    )  # fmt: skip
    return key, value
