"""Which options each question has, on the command line and in Python: the same rows."""

from memplan.fast_dataclass import replace
from memplan.options.largest import LEAST, or_max, read_whole
from memplan.options.panels import GOAL_PANEL, PARALLEL_PANEL
from memplan.options.planning import PLANNED_FIELDS
from memplan.options.rows.settings import GROUPED_OPTIONS, SETTING_OPTIONS, read_tokens
from memplan.options.rows.shared import (
    ALLOW,
    CARDS,
    CPU_MEMORY,
    ENGINE,
    ENGINE_OPTION,
    FILES,
    FSDP_STRATEGY,
    GLOBAL_BATCH,
    GPUS,
    LAUNCH_FILES,
    MODEL,
    NODES,
    NUM_LAYERS,
    OFFLOAD,
    POOLS,
    PRECISION,
    ZERO,
)
from memplan.options.table import Option, as_axis

SETTINGS = (*SETTING_OPTIONS, *GROUPED_OPTIONS)
"""One value of each."""
VARIED = tuple(option for option in SETTING_OPTIONS if option.axis_help)


def _or_max(option: Option) -> Option:
    """An option that takes ``max`` too, where its value can be looked for."""
    if option.parameter not in LEAST:
        return option
    return replace(
        option, metavar=f"{option.metavar}|max", parser=or_max(option.parser or read_whole),
        help_text=f"{option.help_text.rstrip('.')}; max: the largest that fits.",
    )  # fmt: skip


def _goal(flag: str, help_text: str, metavar: str, **more: object) -> Option:
    return Option(
        flag=flag, help_text=help_text, metavar=metavar, panel=GOAL_PANEL,
        **{"kind": str | None, "show_default": False, **more},  # type: ignore[arg-type]
    )  # fmt: skip


def _degrees(flag: str, also: str, what: str) -> Option:
    """An option that takes degrees of one kind."""
    return Option(
        flag=flag, also=(also,), kind=str | None, metavar="LIST", panel=PARALLEL_PANEL, show_default=False,
        help_text=f"{what}: 1,2,4 or 1..8. [default: what is usual, where that is faster or all that fits]",
    )  # fmt: skip


ONE_SETUP = (
    GPUS, NODES, *CARDS, ENGINE, ZERO, *OFFLOAD, *SETTINGS, ENGINE_OPTION, PRECISION,
)  # fmt: skip
"""What one setup is, beside its files, and the card it is judged by."""
ESTIMATE = (
    GPUS, NODES, *CARDS, CPU_MEMORY, ENGINE, ZERO, *OFFLOAD, FSDP_STRATEGY, *map(_or_max, SETTINGS),
    ENGINE_OPTION, GLOBAL_BATCH, ALLOW, PRECISION, NUM_LAYERS, *FILES, *LAUNCH_FILES, *MODEL,
)  # fmt: skip
"""Of ``estimate``."""
SWEEP_AXES = (GPUS, NODES, ENGINE, ZERO, FSDP_STRATEGY, *OFFLOAD, *VARIED, PRECISION)
"""What may have several values in a sweep."""
SWEEP_ONCE = (*CARDS, CPU_MEMORY, *GROUPED_OPTIONS, GLOBAL_BATCH, ENGINE_OPTION, *FILES, *MODEL)
"""What has one."""
PLAN_AXES = (
    ENGINE, ZERO, PRECISION,
    *(each for each in VARIED if each.field == "checkpointing"),
    *(each for each in VARIED if each.field not in PLANNED_FIELDS),
)  # fmt: skip
"""What a plan may be held to, one value or several."""
PLAN_NODES = replace(
    as_axis(NODES), help_text="Nodes of 8 GPUs each, in place of --gpus: 1,2,4 or 1..8."
)
GOAL = (
    _goal("--objective", "What comes first: speed, cost, gpus or batch.", "WHAT", kind=str, default="speed"),
    _goal("--maximize", "Find the largest batch, seq-len or layers (in each stack) that fit.", "WHAT"),
    _goal("--batch-size", "Sequences of one micro-batch, with --maximize seq-len or layers.", "N", kind=int,
          default=1, minimum=1, show_default=True),
    ALLOW,
    _goal("--headroom", "Memory to keep free besides, such as 5%.", "SHARE", kind=str, default="0%"),
    _goal("--limit", "Setups to show.", "N", kind=int, default=10, minimum=1, show_default=True),
    GLOBAL_BATCH,
    _goal("--seq-len", "Tokens of a sequence. [default: the context, at most 2048]", "N", kind=int | None,
          parser=read_tokens),
    _degrees("--tensor-parallel", "--tp", "GPUs that split each layer between them"),
    _degrees("--pipeline-parallel", "--pp", "Stages that layers are shared out to"),
    _degrees("--virtual-stages", "--vp", "Stages of one GPU of a pipeline"),
    _degrees("--context-parallel", "--cp", "GPUs that split each sequence between them"),
    _degrees("--expert-parallel", "--ep", "GPUs that experts are shared out to"),
)  # fmt: skip
"""What a plan is for."""
PLAN_ONCE = (*CARDS, CPU_MEMORY, *GOAL, *GROUPED_OPTIONS, *FILES, *MODEL)
"""What it has one value of; numbers of GPUs are looked through."""
SWEEP = tuple(map(as_axis, SWEEP_AXES)) + SWEEP_ONCE
"""Of ``sweep``, as they are typed."""
PLAN = (as_axis(GPUS), PLAN_NODES, POOLS, *PLAN_ONCE, *map(as_axis, PLAN_AXES))
"""Of ``plan``, as they are typed."""
