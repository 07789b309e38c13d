"""What an adapter records on the tape, beside the module that it stands on (peft 0.21.2)."""

from memplan.dtypes import DType
from memplan.graph.operations import drop, matmul_weight
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.training.adapters import Lora


def low_rank(
    t: Tape, lora: Lora, dtype: DType, module: str, weight: Parameter, rank: int
) -> tuple[Parameter, tuple[Parameter, ...]]:
    """A, and B with the bias it may have."""
    out_features, in_features = weight.matrix_shape[-2:]
    down = t.parameter(
        f"{module}.lora_A.default.weight", rank, in_features, dtype=dtype, of_adapter=True
    )
    name = f"{module}.lora_B.default"
    up = [t.parameter(f"{name}.weight", out_features, rank, dtype=dtype, of_adapter=True)]
    if lora.lora_bias:
        up.append(t.parameter(f"{name}.bias", out_features, dtype=dtype, of_adapter=True))
    return down, tuple(up)


def beside_linear(
    t: Tape, lora: Lora, x: Tensor, out: Tensor, down: Parameter, up: tuple[Parameter, ...]
) -> Tensor:
    """``result + lora_B(lora_A(dropout(x))) * scaling`` (``peft.tuners.lora.layer.Linear``).

    x is cast to the adapter's format first, and the sum back to the result's.
    """
    given = t.cast(x, down.dtype)
    dropped = drop(t, given) if lora.dropout else given
    scaled = t.scale(matmul_weight(t, matmul_weight(t, dropped, down), *up))
    total = t.cast(t.add(out, scaled), out.dtype)
    t.touch(given, x)
    return total
