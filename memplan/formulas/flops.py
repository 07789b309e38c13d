"""FLOPs of a training step by the formulas in print; a multiply-add counts as 2.

Nomenclature: T tokens of the step, s tokens of a sequence, b sequences, h hidden size, L layers, a
query heads, g key and value heads, d head size, f feed-forward width, V vocabulary, N parameters.
Each source has its own convention for causal attention: whether the half of the scores that the
mask discards is counted. It is named in every function.

References
----------
.. [1] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
   Megatron-LM," 2021. arXiv:2104.04473, section 5.1 and appendix.
.. [2] A. Chowdhery et al., "PaLM: Scaling language modeling with pathways," 2022.
   arXiv:2204.02311, appendix B.
.. [3] J. Kaplan et al., "Scaling laws for neural language models," 2020. arXiv:2001.08361, table 1.
.. [4] Megatron-LM d98e8a64, ``megatron/training/training.py`` line 802,
   ``num_floating_point_operations``.
.. [5] torchtitan 0.3.0, ``get_nparams_and_flops``.
.. [6] mosaicml/llm-foundry, ``scripts/train/benchmarking/README.md``.
"""

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FormulaShape:
    """The sizes that closed forms ask for: a decoder of equal layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    intermediate_size: int
    """Of the dense network, or 0 where all layers are mixtures."""
    gated: bool
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    """Width of the expert that every token passes."""

    @property
    def query_size(self) -> int:
        """``a·d``, which need not be the hidden size."""
        return self.num_heads * self.head_dim


GPT_WIDTH = 4
"""A GPT's feed-forward width over its hidden size."""


def layer_flops_letters(shape: FormulaShape) -> tuple[tuple[str, str], ...]:
    """What each product of a layer costs forward, in letters; they are added up in [1]_'s appendix.

    With as many key heads as query heads, ``ad = h`` and ``f = 4h`` they are ``6bsh²``, ``2bs²h`` twice,
    ``2bsh²`` and ``8bsh²`` twice; a gated network has two products up.

    >>> gpt = FormulaShape(
    ...     num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, value_head_dim=4,
    ...     intermediate_size=32, gated=False, vocab_size=100,
    ... )
    >>> " + ".join(letters for _, letters in layer_flops_letters(gpt))
    '6bsh² + 2bs²h + 2bs²h + 2bsh² + 8bsh² + 8bsh²'
    """
    h = shape.hidden_size
    is_square = shape.query_size == h == shape.num_heads * shape.value_head_dim
    is_wide = shape.intermediate_size == GPT_WIDTH * h and not shape.gated
    keys, values, out = ("2bs²h", "2bs²h", "2bsh²") if is_square else ("2bs²ad", "2bs²ad", "2bshad")
    if shape.value_head_dim != shape.head_dim:
        keys, values, out = "2bs²a·d_qk", "2bs²a·d_v", "2bsha·d_v"
    projections = "2bsh(a + 2g)d"
    if is_square and shape.num_kv_heads == shape.num_heads:
        projections = "6bsh²"
    elif shape.value_head_dim != shape.head_dim:
        projections = "through latents"
    found = [
        ("query, key, value", projections), ("queries x keys", keys), ("scores x values", values),
        ("attention output", out),
    ]  # fmt: skip
    if not shape.num_experts:
        up = "8bsh²" if is_wide else "4bshf (gate and up)" if shape.gated else "2bshf"
        found += [("feed-forward up", up), ("feed-forward down", "8bsh²" if is_wide else "2bshf")]
    else:
        matrices = 6 if shape.gated else 4
        found.append(("experts", f"{matrices}bshfk for k chosen ones of width f"))
    return tuple(found)


def layer_step_flops(hidden_size: int, *, seq_len: int, batch_size: int, recomputed: bool) -> int:
    """Forward and backward of one GPT layer, recomputed or not.

    Equation: ``72bsh²(1 + s/(6h))``, ``96bsh²(1 + s/(6h))`` with recomputation ([1]_). All s x s
    scores are counted; the network is 4h wide.

    >>> layer_step_flops(1024, seq_len=2048, batch_size=1, recomputed=False)
    206158430208
    """
    factor = 96 if recomputed else 72
    linear = factor * batch_size * seq_len * hidden_size**2
    return linear + factor * batch_size * seq_len**2 * hidden_size // 6


def narayanan_flops(
    *,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    recomputed_share: float = 0.0,
) -> int:
    """A GPT's whole step, a share gamma of its layers recomputed.

    Equation: ``(3 + gamma)·24bsh²L(1 + s/(6h)) + 6bshV``; with gamma = 1 equation 3 of [1]_,
    ``96bsLh²(1 + s/(6h) + V/(16Lh))``. All s x s scores are counted.

    >>> narayanan_flops(
    ...     num_layers=96, hidden_size=12288, vocab_size=51200, seq_len=2048, batch_size=1,
    ...     recomputed_share=1.0,
    ... ) / 1e15
    2.936829917528064
    """
    tokens = batch_size * seq_len
    layer = 24 * tokens * hidden_size**2 + 4 * tokens * seq_len * hidden_size
    recomputed = round(recomputed_share * num_layers)
    return (3 * num_layers + recomputed) * layer + 6 * tokens * hidden_size * vocab_size


def kaplan_flops(num_params: int, *, tokens: int) -> int:
    """The 6N rule: forward 2N, backward 4N for each token, scores left out.

    Equation: ``6NT`` ([3]_). N is meant without the embeddings; many count them all the same.

    >>> kaplan_flops(7_000_000_000, tokens=2048) / 1e12
    86.016
    """
    return 6 * num_params * tokens


def palm_flops(
    num_params: int, *, tokens: int, seq_len: int, num_layers: int, num_heads: int, head_dim: int
) -> int:
    """What PaLM's model FLOPs utilisation divides by.

    Equation: ``T(6N + 12Lads)`` ([2]_): all parameters, all s x s scores, no recomputation.

    >>> palm_flops(
    ...     7_000_000_000, tokens=2048, seq_len=2048, num_layers=32, num_heads=32, head_dim=128
    ... ) / 1e12
    92.613069766656
    """
    return tokens * (6 * num_params + 12 * num_layers * num_heads * head_dim * seq_len)


def torchtitan_flops(
    num_params: int, *, embedding_params: int, tokens: int, seq_len: int, shape: FormulaShape
) -> int:
    """torchtitan's: the token table left out, the output matrix counted even where it is tied.

    Equation: ``T(6(N - N_embedding) + 6La(d_qk + d_v)s)`` ([5]_): active parameters of a mixture,
    all s x s scores. ``embedding_params`` is 0 where the table is the output matrix too.
    """
    scores = shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_head_dim)
    return tokens * 6 * (num_params - embedding_params + scores * seq_len)


def llm_foundry_flops(
    num_params: int, *, tokens: int, seq_len: int, num_layers: int, hidden_size: int
) -> int:
    """Three times the forward pass as MosaicML counts it.

    Equation: ``3T(2N + 4Lhs)`` ([6]_): all s x s scores. The same as PaLM's where ``ad = h``.
    """
    return 3 * tokens * (2 * num_params + 4 * num_layers * hidden_size * seq_len)


def megatron_flops(shape: FormulaShape, *, seq_len: int, batch_size: int) -> int:
    """Megatron-LM's count of a step.

    Equation: ``3·Σ`` over layers of ``4Tf·h`` (``6Tf·h`` gated), ``4T·h·ad(1 + g/a)`` and
    ``2bs²·ad``, and ``2ThV`` ([4]_): scores are halved for the causal mask, routers ignored.

    >>> shape = FormulaShape(
    ...     num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, value_head_dim=4,
    ...     intermediate_size=32, gated=False, vocab_size=100,
    ... )
    >>> megatron_flops(shape, seq_len=16, batch_size=1)
    248832
    """
    tokens, h = batch_size * seq_len, shape.hidden_size
    attention = 4 * tokens * (shape.query_size + shape.num_kv_heads * shape.head_dim) * h
    scores = 2 * batch_size * seq_len**2 * shape.query_size
    width = shape.intermediate_size
    if shape.num_experts:
        width = shape.expert_size * shape.experts_per_token + shape.shared_size
    network = (6 if shape.gated else 4) * tokens * h * width
    layers = shape.num_layers * (attention + scores + network)
    return 3 * (layers + 2 * tokens * h * shape.vocab_size)
