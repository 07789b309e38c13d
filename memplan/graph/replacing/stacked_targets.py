"""What peft makes of targets that name experts' matrices one by one, where transformers 5 stacks them.

peft 0.21.2, ``peft/utils/transformers_weight_conversion.py``, ``_convert_peft_config_moe``: such names
become adapters on the stacked weights, of gate and up together of twice the rank. They then mean no
module any more, so that shared experts and dense layers' networks are left alone.
"""

import re
from collections.abc import Mapping

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.module_names import ModuleKind, NamedModule
from memplan.training.adapters import ALL_LINEAR, EVERY_LINEAR, LINEAR_NAMES, Lora

_MIXTRAL: Mapping[str, str] = {
    "gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
}  # fmt: skip
_QWEN: Mapping[str, str] = {
    "gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}  # fmt: skip
EXPERT_NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(
        ("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
         "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe",
         "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe",
         "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "solar_open"), _QWEN,
    ),
}  # fmt: skip
"""For each type that peft does it for, old names and the weights they are in; Qwen2-MoE is not among them."""


def as_stacked(
    family: str, lora: Lora, modules: tuple[NamedModule, ...], weights: tuple[NamedModule, ...]
) -> Lora:
    """An adapter whose targets name the stacked weights.

    Every linear layer, the output matrix too, is nothing that peft has a word for: they are linear layers alone.
    Raises ``SetupError`` where only one of the matrices fused in a weight is named.
    """
    names = EXPERT_NAMES.get(family)
    if names is None or lora.targets is None or lora.targets == EVERY_LINEAR:
        return lora
    left: list[str] = []
    found: dict[str, set[str]] = {}
    for target in _spelt_out(lora.targets, names, modules, weights):
        old = target.rpartition(".")[2]
        if old in names:
            found.setdefault(names[old], set()).add(old)
        else:
            left.append(target)
    ranks = dict(lora.rank_pattern)
    for weight, old_names in found.items():
        fused = {each for each in names if names[each] == weight}
        if missing := sorted(fused - old_names):
            msg = (
                f"adapter: targets: {', '.join(sorted(old_names))} of {family} is in one weight with "
                f"{', '.join(missing)}, and peft adapts both or none: name {', '.join(missing)} too"
            )
            raise SetupError(msg)
        if len(fused) > 1:
            ranks[rf".*\.{weight}"] = lora.rank * len(fused)
    return replace(
        lora, targets=tuple(left), parameters=(*lora.parameters, *found), rank_pattern=ranks
    )


def _spelt_out(
    targets: tuple[str, ...] | str,
    names: Mapping[str, str],
    modules: tuple[NamedModule, ...],
    weights: tuple[NamedModule, ...],
) -> tuple[str, ...]:
    """The last parts of the names that a text means (``_resolve_string_target_modules``)."""
    if not isinstance(targets, str):
        return targets
    if targets in (ALL_LINEAR, LINEAR_NAMES):
        linear = [each for each in modules if each.kind is ModuleKind.LINEAR and not each.is_output]
        more = names if targets == ALL_LINEAR else ()
        return tuple(dict.fromkeys((*(_leaf(each.name) for each in linear), *more)))
    found = [_leaf(each.name) for each in modules if re.fullmatch(targets, each.name)]
    for old, new in names.items():
        containers = (each.name.rpartition(".")[0] for each in weights if _leaf(each.name) == new)
        if any(re.fullmatch(targets, f"{container}.{old}") for container in containers):
            found.append(old)
    return tuple(dict.fromkeys(found)) or (targets,)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
