"""What a transformer layer keeps for the backward pass, by the formulas in print.

Nomenclature: s tokens, b sequences, h hidden size, a heads, t tensor-parallel degree, p bytes of a
number, L layers. All of them mean a GPT layer: as many key heads as query heads, a GELU network of
4h, dropout with one-byte masks, scores written out.

References
----------
.. [1] V. Korthikanti et al., "Reducing activation recomputation in large transformer models,"
   2022. arXiv:2205.05198, equation 2 and table 2.
.. [2] T. Chen, B. Xu, C. Zhang, and C. Guestrin, "Training deep nets with sublinear memory cost,"
   2016. arXiv:1604.06174, section 4.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass


class TextbookRecomputation(Enum):
    """What [1]_ recomputes."""

    NONE = "none"
    SELECTIVE = "selective"
    """Scores, softmax and dropout of the attention."""
    FULL = "full"
    """All but the layer's input."""


def layer_activation_bytes(
    hidden_size: int, *, num_heads: int, seq_len: int, batch_size: int, precision: int = 2
) -> int:
    """One layer, with numbers of p bytes and masks of one [bytes].

    Equation: ``psbh(16 + 2/p + 2as/h + as/(ph))``; with p = 2 ``sbh(34 + 5as/h)``, equation 2 of
    [1]_.

    >>> layer_activation_bytes(4096, num_heads=32, seq_len=2048, batch_size=1) // 2**20
    912
    """
    numbers = 16 * hidden_size + 2 * num_heads * seq_len
    masks = 2 * hidden_size + num_heads * seq_len
    return seq_len * batch_size * (precision * numbers + masks)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPart:
    """One part of a layer's activations."""

    name: str
    equation: str
    num_bytes: int


def layer_parts(
    hidden_size: int, *, num_heads: int, seq_len: int, batch_size: int, precision: int = 2
) -> tuple[LayerPart, ...]:
    """What ``layer_activation_bytes`` adds up: attention, the network and two norms (section 4.1 of [1]_).

    Equations: attention ``5psbh + sbh + 2pas²b + as²b`` (inputs of three products, queries, keys, values and
    what the output reads; the dropout's mask; scores behind softmax and behind dropout; that one's mask), the
    network ``9psbh + sbh``, norms ``2psbh``. Masks are bytes, whatever p is.

    >>> parts = layer_parts(4096, num_heads=32, seq_len=2048, batch_size=1)
    >>> sum(part.num_bytes for part in parts) // 2**20
    912
    """
    rows = seq_len * batch_size * hidden_size
    scores = num_heads * seq_len**2 * batch_size
    p = precision
    return (
        LayerPart(
            name="attention", equation="5psbh + sbh + 2pas²b + as²b",
            num_bytes=(5 * p + 1) * rows + (2 * p + 1) * scores,
        ),
        LayerPart(name="network", equation="9psbh + sbh", num_bytes=(9 * p + 1) * rows),
        LayerPart(name="norms", equation="2psbh", num_bytes=2 * p * rows),
    )  # fmt: skip


def masked_scores_bytes(*, num_heads: int, seq_len: int, batch_size: int) -> int:
    """The s x s parts in 16 bits with a mask before the softmax, which is kept too [bytes].

    Equation: ``6abs²``: softmax 2, dropout's result 2 and mask 1, and the mask of ``masked_fill`` 1 for each
    score (as in [1]_, which has no mask and so ``5abs²``).

    >>> masked_scores_bytes(num_heads=32, seq_len=2048, batch_size=1) // 2**20
    768
    """
    return 6 * num_heads * batch_size * seq_len**2


def gpu_elements(hidden_size: int, *, num_heads: int, seq_len: int, batch_size: int) -> int:
    """What a form in print calls activations for each GPU: of one layer, and in numbers, not bytes.

    Equation: ``(2sa + 16h)·sb``.

    >>> gpu_elements(4096, num_heads=32, seq_len=2048, batch_size=1) // 2**20
    384
    """
    return (2 * seq_len * num_heads + 16 * hidden_size) * seq_len * batch_size


def layer_elements_bytes(
    hidden_size: int, *, num_heads: int, seq_len: int, batch_size: int, precision: int = 2
) -> int:
    """The same without the masks, a form that calculators use [bytes].

    Equation: ``p·(2·seq·heads + 16·hidden)·seq·batch``.

    >>> layer_elements_bytes(4096, num_heads=32, seq_len=2048, batch_size=1) // 2**20
    768
    """
    return precision * gpu_elements(
        hidden_size, num_heads=num_heads, seq_len=seq_len, batch_size=batch_size
    )


def parallel_layer_bytes(
    hidden_size: int,
    *,
    num_heads: int,
    seq_len: int,
    batch_size: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recomputation: TextbookRecomputation = TextbookRecomputation.NONE,
) -> int:
    """One layer's share of a GPU under tensor parallelism [bytes].

    Equations (table 2 of [1]_): ``sbh(10 + 24/t + 5as/(ht))``, with sequence parallelism
    ``sbh(34/t + 5as/(ht))``; selective recomputation drops the last term; full leaves ``2sbh``.

    >>> parallel_layer_bytes(
    ...     12288, num_heads=96, seq_len=2048, batch_size=1, tensor_parallel=8,
    ...     sequence_parallel=True, recomputation=TextbookRecomputation.SELECTIVE,
    ... ) == 34 * 2048 * 12288 // 8
    True
    """
    tokens, share = seq_len * batch_size, tensor_parallel
    if recomputation is TextbookRecomputation.FULL:
        return 2 * tokens * hidden_size // (share if sequence_parallel else 1)
    total = (34 if sequence_parallel else 24) * hidden_size
    whole = 0 if sequence_parallel else 10 * hidden_size
    if recomputation is TextbookRecomputation.NONE:
        total += 5 * num_heads * seq_len
    return tokens * (whole * share + total) // share


def square_root_bytes(layer_bytes: int, *, num_layers: int) -> int:
    """Activations of L equal layers, checkpointed at every square root of L-th one [bytes].

    Equation: ``2·√L·A``: √L kept inputs and √L layers in full at a time ([2]_ counts each as one
    unit A).

    >>> square_root_bytes(100, num_layers=64)
    1600
    """
    return int(2 * num_layers**0.5 * layer_bytes)
