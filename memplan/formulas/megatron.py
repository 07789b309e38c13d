"""Megatron-LM's ``--theoretical-memory``: what its report prints before a run.

Nomenclature: h hidden size, a heads, g key and value heads, k head size, f feed-forward width, E
experts, V padded vocabulary, L layers, t, p, v tensor, pipeline and virtual pipeline degree, m
micro-batches, d data-parallel degree. The report ignores grouped queries, mixtures and flash
attention in its activations, and knows no full recomputation.

References
----------
.. [1] Megatron-LM d98e8a64, ``megatron/training/theoretical_memory_usage.py``.
.. [2] Megatron-LM d98e8a64, ``docs/user-guide/features/dist_optimizer.md``.
"""

from fractions import Fraction

from memplan.fast_dataclass import dataclass
from memplan.formulas.flops import FormulaShape

BYTES_PER_PARAMETER = 18
"""16-bit weight 2, fp32 gradient 4, fp32 master weight and two moments 12 ([2]_)."""

SHARDED_BYTES = 12
"""Of those, what the distributed optimizer shards."""

OVERHEAD_PERCENT = 5
"""What the report adds to its second formula for activations ([1]_)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLayout:
    """How Megatron divides a model."""

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    expert_parallel: int = 1
    data_parallel: int = 1
    distributed_optimizer: bool = False
    selective: bool = False
    """Core attention is recomputed."""
    num_microbatches: int = 1


def shard_parameters(
    shape: FormulaShape, *, tied: bool, rms_norm: bool, layout: MegatronLayout
) -> int:
    """Parameters of the most loaded GPU.

    Equation ([1]_): ``[L(2h²(1 + g/a)(ak/h) + 2hfw)/p + hV]/t``, ``+ hV/t`` untied on one pipeline
    stage, norms and routers over p alone, experts over ``p·t·e``; w is 3/2 gated, else 1.
    """
    h, p, t = shape.hidden_size, layout.pipeline_parallel, layout.tensor_parallel
    attention = 2 * h * (shape.query_size + shape.num_kv_heads * shape.head_dim)
    factor = 3 if shape.gated else 2
    blocks = shape.num_layers * (
        attention + factor * h * (shape.intermediate_size + shape.shared_size)
    )
    experts = shape.num_layers * factor * h * shape.expert_size * shape.num_experts
    norms = h * (1 if rms_norm else 2) * (2 * shape.num_layers + 1)
    replicated = norms + shape.num_layers * h * shape.num_experts
    table = h * shape.vocab_size
    tables = table if tied or p > 1 else 2 * table
    total = (Fraction(blocks, p) + tables) / t + Fraction(replicated, p)
    total += Fraction(experts, p * t * layout.expert_parallel)
    return int(total)


def state_bytes(num_params: int, *, layout: MegatronLayout) -> int:
    """Weights, gradients and optimizer of the most loaded GPU [bytes].

    Equation: 18 bytes a parameter, or ``6 + 12/d`` with the distributed optimizer ([2]_).

    >>> layout = MegatronLayout(data_parallel=8, distributed_optimizer=True)
    >>> state_bytes(1000, layout=MegatronLayout()), state_bytes(1000, layout=layout)
    (18000, 7500)
    """
    if not layout.distributed_optimizer:
        return BYTES_PER_PARAMETER * num_params
    whole = BYTES_PER_PARAMETER - SHARDED_BYTES
    return whole * num_params + SHARDED_BYTES * num_params // layout.data_parallel


def activation_bytes(
    shape: FormulaShape, *, seq_len: int, batch_size: int, layout: MegatronLayout
) -> int:
    """Activations of the first pipeline stage [bytes].

    Equations ([1]_): with sequence parallelism and selective recomputation ``sbh(18 + 4f/h)L/t``;
    in every other case ``sbh(10 + 24/t)L`` and 5 % on top. Both with ``8sbp`` of ids, ``sbhp`` of
    the embedding's dropout, the pipeline's factor, and the logits on one stage.

    >>> shape = FormulaShape(
    ...     num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128,
    ...     value_head_dim=128, intermediate_size=16384, gated=False, vocab_size=50176,
    ... )
    >>> selective = MegatronLayout(sequence_parallel=True, selective=True)
    >>> round(activation_bytes(shape, seq_len=2048, batch_size=1, layout=selective) / 2**30, 2)
    8.92
    """
    tokens, h, p = seq_len * batch_size, shape.hidden_size, layout.pipeline_parallel
    t = layout.tensor_parallel
    exact = layout.sequence_parallel and layout.selective
    width = shape.intermediate_size or shape.expert_size * shape.experts_per_token
    if exact:
        total = Fraction(tokens * (18 * h + 4 * width) * shape.num_layers)
    else:
        total = Fraction(tokens * h * (10 * t + 24) * shape.num_layers, t)
    total += 8 * tokens * p + tokens * h * p
    if layout.virtual_stages > 1:
        total *= 1 + Fraction(p - 1, p * layout.virtual_stages)
    elif p > 1:
        total *= min(Fraction(1), Fraction(layout.num_microbatches, p))
    if exact:
        if p == 1:
            total += 4 * tokens * (h + shape.vocab_size)
        return int(total / t)
    if p == 1:
        total += 2 * (Fraction(tokens * shape.vocab_size, t) + tokens * h)
    return int(total * (100 + OVERHEAD_PERCENT) / 100)
