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


def layer_elements_bytes(
    hidden_size: int, *, num_heads: int, seq_len: int, batch_size: int, precision: int = 2
) -> int:
    """The same without the masks, a form that calculators use [bytes].

    Equation: ``p·(2·seq·heads + 16·hidden)·seq·batch``.

    >>> layer_elements_bytes(4096, num_heads=32, seq_len=2048, batch_size=1) // 2**20
    768
    """
    numbers = 2 * seq_len * num_heads + 16 * hidden_size
    return precision * numbers * seq_len * batch_size


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
