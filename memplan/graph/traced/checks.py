"""What cannot be chosen for a module that was traced: it calls what it calls."""

from memplan.errors import SetupError
from memplan.graph.core.options import TapeOptions
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import Kernels, Packing
from memplan.training.freezing import FrozenParts
from memplan.training.objectives import Objective


def check_traced(model: ModelSpec, options: TapeOptions) -> None:
    """Refuse what would need another module than the one that was traced.

    Raises ``SetupError``, which names the field.
    """
    refused = {
        "kernels": options.kernels not in (Kernels(), TapeOptions().kernels),
        "tensor_parallel": options.tensor_parallel is not None,
        "context_parallel": options.context_parallel is not None,
        "expert_parallel": options.expert_parallel is not None,
        "pipeline_parallel": options.stage is not None,
        "engine": options.megatron is not None,
        "packing": options.packing is not Packing.NONE,
        "job": options.objective is not Objective.TASK,
        "freeze": options.freeze != FrozenParts(),
    }
    for name, is_asked in refused.items():
        if is_asked:
            msg = (
                f"{name}: {model.name} is a traced module, which calls what it calls: leave `{name}` out, or trace it "
                "as it is meant to run"
            )
            raise SetupError(msg)
