"""Which modules of a model an adapter stands on, found as peft 0.21 finds them.

peft goes through ``named_modules()`` and compares each name with the targets
(``peft.tuners.tuners_utils.check_target_module_exists``), so it is done here with the names that
transformers' class gives its modules (``ModelSpec.module_names``).
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from memplan.dtypes import DType
from memplan.errors import SetupError, nearest
from memplan.fast_dataclass import dataclass
from memplan.graph.adapters import beside_linear, beside_linear_dora, low_rank
from memplan.graph.module_names import ModuleKind, NamedModule, named_modules
from memplan.graph.overlay import Ranks
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.spec import ModelSpec
from memplan.training.adapters import ALL_LINEAR, Adapter, TrainedBias

NO_RANKS: Ranks = {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adaptation:
    """An adapter laid over a model."""

    adapter: Adapter
    dtype: DType
    """Of its weights."""
    ranks: Mapping[str, tuple[Ranks, ...]]
    """For each segment's name, what is adapted in each of its repetitions."""
    saved: Mapping[str, tuple[frozenset[str], ...]]
    """For each segment's name, the modules of which a copy is trained."""

    def at(self, name: str, repetition: int) -> Ranks:
        """What is adapted in one repetition of the segments of a name."""
        found = self.ranks.get(name, ())
        return found[repetition] if repetition < len(found) else NO_RANKS

    def saves(self, name: str, repetition: int, module: str) -> bool:
        """Whether a copy of a module, or of one that it is in, is trained."""
        found = self.saved.get(name, ())
        if repetition >= len(found):
            return False
        return any(module == each or module.startswith(f"{each}.") for each in found[repetition])

    def trains_bias(self, module: str, ranks: Ranks) -> bool:
        """Whether a module's own bias is trained."""
        bias = self.adapter.bias
        return bias is TrainedBias.ALL or (bias is TrainedBias.LORA_ONLY and module in ranks)

    def beside_linear(
        self,
        t: Tape,
        x: Tensor,
        out: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        module: str,
    ) -> Tensor:
        """Record what an adapted linear layer does with its result."""
        lora = self.adapter
        down, up = low_rank(t, lora, self.dtype, module, weight, t.adapted[module])
        if weight.packed is not None:
            from memplan.graph.quantized import beside_packed  # only where something is quantized

            return beside_packed(t, lora, x, out, weight, bias, (down, up))
        if lora.dora:
            return beside_linear_dora(t, lora, x, out, weight, bias, down, up)
        return beside_linear(t, lora, x, out, down, up)

    def cuts(self, name: str) -> set[int]:
        """Numbers of repetitions that are not adapted as the one before."""
        ranks, saved = self.ranks.get(name, ()), self.saved.get(name, ())
        return {
            number
            for number in range(1, max(len(ranks), len(saved)))
            if self.at(name, number) != self.at(name, number - 1)
            or saved[number : number + 1] != saved[number - 1 : number]
        }


def adapt(model: ModelSpec, plain: Tape, adapter: Adapter, dtype: DType) -> Adaptation:
    """Lay an adapter over a model; ``plain`` is its tape without one.

    Raises ``SetupError`` for modules that the model does not have, or that cannot be adapted.
    """
    modules = named_modules(model, plain)
    chosen = list(_chosen(model, adapter, modules))
    saved = [each for each in modules if _is_saved(each, adapter)]
    _check_saved(model, adapter, modules, saved)
    for each in chosen:
        _check_kind(model, each)
    return Adaptation(
        adapter=adapter,
        dtype=dtype,
        ranks={
            name: tuple({each.module: _rank_of(each, adapter) for each in row} for row in rows)
            for name, rows in _by_repetition(chosen).items()
        },
        saved={
            name: tuple(frozenset(each.module for each in row) for row in rows)
            for name, rows in _by_repetition(saved).items()
        },
    )


def _by_repetition(modules: Iterable[NamedModule]) -> dict[str, list[list[NamedModule]]]:
    """Modules by their segments' name, and by repetition."""
    found: dict[str, list[list[NamedModule]]] = {}
    for each in modules:
        rows = found.setdefault(each.segment, [])
        rows += [[] for _ in range(each.repetition + 1 - len(rows))]
        rows[each.repetition].append(each)
    return found


# -- targets -----------------------------------------------------------------------------------------


def _chosen(
    model: ModelSpec, adapter: Adapter, modules: tuple[NamedModule, ...]
) -> Iterator[NamedModule]:
    """The modules that the adapter stands on."""
    targets = adapter.targets
    if targets is None:
        targets = default_targets(model, modules)
    if targets == ALL_LINEAR:
        wanted = [each for each in modules if each.kind is ModuleKind.LINEAR and not each.is_output]
    elif isinstance(targets, str):
        wanted = [each for each in modules if _matches(targets, each.name, "targets")]
        if not wanted:
            raise _unknown(model, targets, modules, "targets")
    else:
        wanted = []
        for target in targets:
            if not any(_ends(each.name, target) for each in modules):
                raise _unknown(model, target, modules, "targets")
        wanted = [each for each in modules if any(_ends(each.name, name) for name in targets)]
    wanted = [each for each in wanted if not _is_left_alone(each, adapter)]
    if adapter.layers and not isinstance(adapter.targets, str):
        wanted = [each for each in wanted if _layer_of(each.name) in adapter.layers]
    if not wanted:
        msg = f"adapter: nothing of {model.name} is left to adapt: layers, exclude or modules_to_save take it all"
        raise SetupError(msg)
    yield from wanted


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _matches(pattern: str, name: str, field: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        msg = f"adapter: {field}: {pattern!r} is no pattern: {error}"
        raise SetupError(msg) from error


def _is_left_alone(each: NamedModule, adapter: Adapter) -> bool:
    exclude = adapter.exclude
    if isinstance(exclude, str):
        excluded = _matches(exclude, each.name, "exclude")
    else:
        excluded = any(_ends(each.name, name) for name in exclude)
    return excluded or _is_saved(each, adapter)


def _is_saved(each: NamedModule, adapter: Adapter) -> bool:
    """It is, or stands in, a module of which a copy is trained."""
    return any(
        re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", each.name)
        for name in adapter.modules_to_save
    )


def _check_saved(
    model: ModelSpec,
    adapter: Adapter,
    modules: tuple[NamedModule, ...],
    saved: list[NamedModule],
) -> None:
    for name in adapter.modules_to_save:
        if not any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", each.name) for each in saved):
            raise _unknown(model, name, modules, "modules_to_save")


def _layer_of(name: str) -> int | None:
    """The number of a module's layer: the first one in its name (``check_target_module_exists``)."""
    found = re.match(r".*?\.[^.]*\.(?P<number>\d+)\.", name)
    return int(found["number"]) if found else None


def _rank_of(each: NamedModule, adapter: Adapter) -> int:
    """The rank of the first pattern that ends its name (``get_pattern_key``)."""
    for pattern, rank in dict(adapter.rank_pattern).items():
        if re.match(rf"(.*\.)?({pattern})$", each.name):
            return rank
    return adapter.rank


def _unknown(
    model: ModelSpec, target: str, modules: tuple[NamedModule, ...], field: str
) -> SetupError:
    known = sorted({each.name.rpartition(".")[2] for each in modules if each.kind.adaptable})
    guess = nearest(target.rpartition(".")[2], known)
    hint = f" Did you mean {guess!r}?" if guess else ""
    return SetupError(
        f"adapter: {field}: {model.name} has no module {target!r}.{hint} It has {', '.join(known)}"
    )


def _check_kind(model: ModelSpec, each: NamedModule) -> None:
    if not each.kind.adaptable:
        msg = f"adapter: targets: {each.name} of {model.name} is neither a linear layer nor an embedding"
        raise SetupError(msg)


def default_targets(model: ModelSpec, modules: tuple[NamedModule, ...]) -> tuple[str, ...] | str:
    """peft's own targets for a model's type.

    Raises ``SetupError`` for a type it has none for.
    """
    found = DEFAULT_TARGETS.get(model.family)
    if found is None:
        known = sorted(
            {each.name.rpartition(".")[2] for each in modules if each.kind is ModuleKind.LINEAR}
        )
        msg = (
            f"adapter: peft has no targets of its own for {model.family}: name them, as all-linear or "
            f"some of {', '.join(known)}"
        )
        raise SetupError(msg)
    return found


_QUERY_VALUE = ("q_proj", "v_proj")
_BERT = ("query", "value")
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("bart", "opt", "gptj", "gpt_neo", "llama", "llama4", "mistral", "mixtral", "stablelm",
         "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"), _QUERY_VALUE,
    ),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm"), _BERT),
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon", "chatglm"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "blip-2": ("q", "v", "q_proj", "v_proj"), "deberta-v2": ("query_proj", "value_proj"),
    "deberta": ("in_proj",), "mpt": ("Wqkv",), "codegen": ("qkv_proj",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "rwkv": ("key", "value", "receptance", "output"),
}  # fmt: skip
"""Targets that peft 0.21 takes where none are named (``peft/utils/constants.py``)."""
