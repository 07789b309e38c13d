"""Parameters, gradients and optimizer states by rule of thumb.

Nomenclature: Φ is the number of parameters, p the bytes of a weight and of its gradient, n the
data-parallel GPUs. Mixed precision means 16-bit weights and gradients with an fp32 master copy.

References
----------
.. [1] S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
   models," 2020. arXiv:1910.02054, section 3.1 and figure 1.
"""

from memplan.errors import SetupError

ADAM_MASTER_BYTES = 12
"""An fp32 copy of the weight and Adam's two moments: 4 + 4 + 4, the K of [1]_."""

FP32_STATES: tuple[tuple[str, int], ...] = (
    ("fp32 weights", 4), ("fp32 gradients", 4), ("Adam's two moments", 8),
)  # fmt: skip
"""Training in fp32: 16 bytes a parameter."""

MIXED_STATES: tuple[tuple[str, int], ...] = (
    ("16-bit weights", 2), ("16-bit gradients", 2), ("fp32 master weights", 4),
    ("Adam's two moments", 8),
)  # fmt: skip
"""Mixed precision: 16 bytes a parameter as well ([1]_, section 3.1)."""

MAX_STAGE = 3


def table_bytes(num_params: int, *, table: tuple[tuple[str, int], ...]) -> int:
    """States of a whole model by a table of bytes per parameter [bytes].

    >>> table_bytes(10**10, table=MIXED_STATES) == table_bytes(10**10, table=FP32_STATES)
    True
    >>> table_bytes(10**10, table=MIXED_STATES) // 10**9
    160
    """
    return num_params * sum(num_bytes for _, num_bytes in table)


def zero_state_bytes(
    num_params: float, *, num_gpus: int, stage: int = 0, precision: int = 2
) -> float:
    """States on one GPU under a ZeRO stage [bytes].

    Equations: ``(2p + 12)Φ``, ``2pΦ + 12Φ/n``, ``pΦ + (p + 12)Φ/n``, ``(2p + 12)Φ/n`` for stages
    0-3 (figure 1 of [1]_). Raises ``SetupError`` for another stage.

    >>> [zero_state_bytes(64, num_gpus=64, stage=stage) for stage in range(4)]
    [1024.0, 268.0, 142.0, 16.0]
    """
    if not 0 <= stage <= MAX_STAGE:
        msg = f"stage is {stage}: ZeRO has stages 0, 1, 2 and 3"
        raise SetupError(msg)
    whole = (precision if stage < 3 else 0) + (precision if stage < 2 else 0)
    whole += ADAM_MASTER_BYTES if stage < 1 else 0
    shared = 2 * precision + ADAM_MASTER_BYTES - whole
    return whole * num_params + shared * num_params / num_gpus


def zero_state_equation(*, stage: int, precision: int = 2) -> str:
    """The equation of a stage with its coefficients put in.

    >>> zero_state_equation(stage=2)
    '2Φ + 14Φ/n'
    """
    total = 2 * precision + ADAM_MASTER_BYTES
    if stage == 0:
        return f"{total}Φ"
    if stage == MAX_STAGE:
        return f"{total}Φ/n"
    whole = precision * (2 if stage == 1 else 1)
    return f"{whole}Φ + {total - whole}Φ/n"
