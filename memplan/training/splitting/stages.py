"""How a pipeline divides a model's layers over its stages."""

from memplan.errors import SetupError
from memplan.text import shown
from memplan.training.splitting.parallelism import PipelineRuntime


def read_layers_per_stage(value: object) -> tuple[int, ...]:
    """Numbers of layers, as a list or as text: ``8,8,7,9``.

    Raises ``SetupError`` for what is none.

    >>> read_layers_per_stage("8,8,7")
    (8, 8, 7)
    """
    parts = value.replace("+", ",").split(",") if isinstance(value, str) else value
    if isinstance(value, str) and all(part.strip().isdecimal() for part in parts):  # type: ignore[attr-defined]
        parts = [int(part) for part in parts]  # type: ignore[attr-defined]
    is_list = isinstance(parts, list | tuple) and bool(parts)
    if not is_list or not all(type(each) is int and each >= 0 for each in parts):  # type: ignore[attr-defined]
        msg = (
            "layers_per_stage: expected the number of layers of each stage, such as 8,8,7,9, got "
            f"{shown(value)}"
        )
        raise SetupError(msg)
    return tuple(parts)  # type: ignore[arg-type]


def divide_layers(
    num_layers: int,
    num_stages: int,
    *,
    explicit: tuple[int, ...] | None = None,
    runtime: PipelineRuntime = PipelineRuntime.TORCH,
) -> tuple[int, ...]:
    """The layers of each stage.

    As many in each where they divide. Where they do not, torchtitan's rule (torchtitan 0.3,
    distributed/pipeline_parallel.py, ``generate_llm_fqn_per_model_part``): the embedding and the head
    count as a layer each, and what is left over goes to the first stages; Megatron refuses.

    Raises ``SetupError`` where a stage would be empty, and for numbers that do not add up.

    >>> divide_layers(32, 4), divide_layers(30, 4)
    ((8, 8, 8, 8), (7, 8, 8, 7))
    """
    if explicit is not None:
        return _explicit(num_layers, num_stages, explicit)
    each, rest = divmod(num_layers, num_stages)
    if each and not rest:
        return (each,) * num_stages
    if rest and each and runtime is PipelineRuntime.MEGATRON:
        raise _undivided(num_layers, num_stages)
    each, rest = divmod(num_layers + 2, num_stages)
    counts = [each + (number < rest) for number in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    if not each or min(counts[1:-1], default=1) < 1:
        msg = (
            f"pipeline_parallel: {num_layers} layers are too few for {num_stages} stages (pipeline_parallel "
            "x virtual_stages)"
        )
        raise SetupError(msg)
    return tuple(counts)


def _undivided(num_layers: int, num_stages: int) -> SetupError:
    each, rest = divmod(num_layers, num_stages)
    some = ",".join(str(each + (number < rest)) for number in range(num_stages))
    return SetupError(
        f"pipeline_parallel: {num_layers} layers do not divide into {num_stages} stages: {num_layers} = "
        f"{num_stages} x {each} + {rest}; name them, as `layers_per_stage={some}`"
    )


def _explicit(num_layers: int, num_stages: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    words = " + ".join(map(str, counts))
    if len(counts) != num_stages:
        msg = (
            f"layers_per_stage: {words} is of {len(counts)} stages, and there are {num_stages} "
            "(pipeline_parallel x virtual_stages)"
        )
        raise SetupError(msg)
    if sum(counts) != num_layers:
        msg = f"layers_per_stage: {words} = {sum(counts)}, and the model has {num_layers} layers"
        raise SetupError(msg)
    if 0 in counts[1:-1]:
        msg = f"layers_per_stage: {words}: only the first and the last stage may have no layer"
        raise SetupError(msg)
    return counts
