"""Parameter counts by closed form, against which people check a config.

Nomenclature: l layers, h hidden size, V vocabulary, h_ffn feed-forward width.

References
----------
.. [1] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
   Megatron-LM," 2021. arXiv:2104.04473, equation 2: ``12lh²(1 + 13/(12h) + (V + s)/(12lh))``.
.. [2] H. Touvron et al., "LLaMA: Open and efficient foundation language models," 2023.
   arXiv:2302.13971, section 2.2: ``2/3·4d`` instead of ``4d``; llama/model.py rounds up to ``multiple_of``.
"""

LLAMA_MULTIPLE = 256
"""What LLaMA's feed-forward width is rounded up to (``multiple_of`` of its params.json)."""


def gpt_parameters(*, num_layers: int, hidden_size: int, vocab_size: int) -> int:
    """A GPT's matrices: four of attention, h x h, and two of its network, h x 4h, and the token table.

    Equation: ``12h²l + Vh`` ([1]_ without biases, norms and positions).

    >>> gpt_parameters(num_layers=96, hidden_size=12288, vocab_size=51200) / 10**9
    174.575321088
    """
    return 12 * hidden_size**2 * num_layers + vocab_size * hidden_size


def llama_feed_forward_size(hidden_size: int) -> int:
    """LLaMA's feed-forward width: three matrices of it are about as many numbers as two of 4h.

    Equation: ``256·⌈(8h/3)/256⌉``, about ``8h/3`` ([2]_).

    >>> [llama_feed_forward_size(hidden) for hidden in (4096, 5120, 6656, 8192)]
    [11008, 13824, 17920, 22016]
    """
    width = 2 * 4 * hidden_size // 3
    return LLAMA_MULTIPLE * -(-width // LLAMA_MULTIPLE)


def llama_parameters(
    *, num_layers: int, hidden_size: int, intermediate_size: int, vocab_size: int
) -> int:
    """A Llama with as many key heads as query heads and one token table.

    Equation: ``l(4h² + 3h·h_ffn) + Vh``. It leaves out the norms, ``(2l + 1)h``, and the untied
    output matrix, ``Vh``: for LLaMA-65B 1.3 and 411 million.

    >>> llama_parameters(
    ...     num_layers=80, hidden_size=8192, intermediate_size=22016, vocab_size=50176
    ... )
    65171095552
    """
    layer = 4 * hidden_size**2 + 3 * hidden_size * intermediate_size
    return num_layers * layer + vocab_size * hidden_size
