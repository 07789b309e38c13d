"""A training cluster's memory as a widely read article [3]_ works it out for XLM-RoBERTa-XXL.

Nomenclature: m is the number of parameters in billions, p the bytes of a number, n the GPUs, s the
sequence length, b the micro-batch, h the hidden size, a the heads, L the layers. Results are GB of
10^9 bytes. The article divides states over GPUs as ZeRO does and adds the activations of a
transformer layer as Megatron counts them; with checkpointing it takes the square root of the
activations, which is a root of a number of gigabytes: in another unit it would be another figure.

References
----------
.. [1] S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
   models," 2020. arXiv:1910.02054: what each stage shards.
.. [2] V. Korthikanti et al., "Reducing activation recomputation in large transformer models,"
   2022. arXiv:2205.05198, equation 2: ``sbh(34 + 5as/h)``, which is what p = 2 gives here.
.. [3] M. Shaposhnikov, "Understanding and estimating GPU memory demands for training LLMs in
   practice," medium.com/@maxshapp: its table has batch 8, 64 GPUs, 48 layers, 512 tokens, h = 4096,
   a = 32, m = 10.
"""

from memplan.errors import SetupError
from memplan.formulas.activations import layer_activation_bytes
from memplan.formulas.states import zero_state_bytes
from memplan.units import GB

_BILLION = 10**9


def activations_memory(
    num_layers: int,
    seq_len: int,
    batch_size: int,
    hidden_dim: int,
    num_heads: int,
    precision: int = 2,
) -> float:
    """Activations of all layers, rounded to two decimals [GB].

    ``precision`` is the bytes of a number. Equation: ``L·psbh(16 + 2/p + 2as/h + as/(ph)) / 10^9``
    ([2]_ with the 2 of its 16-bit numbers written p). Raises ``SetupError`` for a count below 1.

    >>> activations_memory(48, 512, 8, 4096, 32, 2)
    43.49
    """
    _check(num_layers=num_layers, seq_len=seq_len, batch_size=batch_size, precision=precision)
    _check(hidden_dim=hidden_dim, num_heads=num_heads)
    layer = layer_activation_bytes(
        hidden_dim, num_heads=num_heads, seq_len=seq_len, batch_size=batch_size, precision=precision
    )
    return round(num_layers * layer / GB, 2)


def gpu_memory_required(
    model_size: float,
    num_gpus: int,
    num_layers: int,
    seq_len: int,
    batch_size: int,
    hidden_dim: int,
    num_heads: int,
    precision: int = 2,
    activations_checkpoint: bool = False,
    stage: int = 0,
) -> float:
    """Memory of one GPU: states under a ZeRO stage, and activations [GB].

    ``model_size`` is in billions of parameters, ``batch_size`` that of one GPU. Equations: ``(2p +
    12)m``, ``2pm + 12m/n``, ``pm + (p + 12)m/n`` and ``(2p + 12)m/n`` for stages 0-3 ([1]_), plus
    ``activations_memory``, to the power 0.5 with checkpointing. Raises ``SetupError`` for a stage
    other than 0-3 and for a count below 1.

    >>> shape = (10, 64, 48, 512, 8, 4096, 32)
    >>> [round(gpu_memory_required(*shape, stage=stage), 2) for stage in range(4)]
    [203.49, 85.37, 65.68, 45.99]
    >>> round(gpu_memory_required(*shape, activations_checkpoint=True, stage=3), 2)
    9.09
    """
    _check(num_gpus=num_gpus)
    if model_size <= 0:
        msg = f"model_size is {model_size}: give billions of parameters, more than 0"
        raise SetupError(msg)
    activations = activations_memory(
        num_layers, seq_len, batch_size, hidden_dim, num_heads, precision
    )
    if activations_checkpoint:
        activations **= 0.5
    states = zero_state_bytes(
        model_size * _BILLION, num_gpus=num_gpus, stage=stage, precision=precision
    )
    return states / GB + activations


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            msg = f"{name} is {count}: it must be at least 1"
            raise SetupError(msg)
