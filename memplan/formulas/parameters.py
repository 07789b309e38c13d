"""Parameter counts by closed form, against which people check a config.

Nomenclature: l layers, h hidden size, V vocabulary, h_ffn feed-forward width.
"""


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
