"""torch.compile under an engine: where its graphs end, and what of that no run has shown."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.compilation import Compilation
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

ROUTING_KINDS = frozenset(
    {
        OperationKind.COUNTED, OperationKind.GROUPED_MM, OperationKind.HISTC, OperationKind.SORT,
        OperationKind.TOPK,
    }
)  # fmt: skip
"""Operations whose sizes hang on values, where the whole model's graph may break; a layer's does not
(Mixtral's grouped products on the CUDA build: held within 0.03 %)."""
UNCOUNTED_KINDS = frozenset({OperationKind.COUNTED})
"""Parts that are merely counted."""


def returns_all_at_once(setup: TrainingSetup) -> bool:
    """Whether one graph's backward pass hands all gradients over when it is done.

    DDP's graphs end with each bucket (torch 2.13, _dynamo/backends/distributed.py, ``DDPOptimizer``),
    and FSDP's and ZeRO-3's hooks on modules break them.
    """
    if setup.compile is not Compilation.MODEL:
        return False
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        return setup.zero_stage is not ZeroStage.PARAMETERS
    return engine is Engine.DDP and setup.num_gpus == 1


def unseen_of_compilation(setup: TrainingSetup, tape: Tape) -> tuple[str, ...]:
    """What torch.compile may hold beside what is counted, in words."""
    if setup.compile is Compilation.NONE:
        return ()
    found = []
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED and setup.zero_stage is ZeroStage.PARAMETERS:
        found.append("what torch.compile keeps where ZeRO-3's hooks break its graphs")
    if engine is Engine.DDP and setup.num_gpus > 1:
        found.append("what torch.compile keeps where DDP's buckets cut its graphs")
    if engine is Engine.FSDP1:
        found.append("what torch.compile keeps where FSDP1's hooks break its graphs")
    if setup.fp8 not in (Fp8Recipe.NONE, Fp8Recipe.TENSORWISE):
        found.append(f"what torch.compile makes of linear layers in {setup.fp8.value}")
    if setup.quantize is not None and setup.compile is Compilation.MODEL:
        found.append("what torch.compile keeps of the whole model's unpacked weights")
    uncertain = UNCOUNTED_KINDS if setup.compile is Compilation.LAYER else ROUTING_KINDS
    if _has_any(tape, uncertain):
        found.append("what torch.compile keeps where routed or counted parts break its graphs")
    return tuple(found)


def _has_any(tape: Tape, kinds: frozenset[OperationKind]) -> bool:
    return any(
        operation.kind in kinds for segment in tape.segments for operation in segment.operations
    )
