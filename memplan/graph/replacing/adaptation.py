"""Which modules of a model an adapter stands on, found as peft 0.21 finds them.

peft goes through ``named_modules()`` and compares each name with the targets
(``peft.tuners.tuners_utils.check_target_module_exists``), so it is done here with the names that
transformers' class gives its modules (``memplan.graph.module_names``).
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from memplan.dtypes import DType
from memplan.errors import SetupError, nearest
from memplan.fast_dataclass import dataclass
from memplan.graph.core.overlay import Ranks, adapter_module, bare_module, weight_key
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.module_names import ModuleKind, NamedModule, named_modules, named_weights
from memplan.graph.replacing.adapters import (
    beside_embedding,
    beside_linear,
    beside_linear_dora,
    low_rank,
    multiplied_by,
    scaled_by,
    summed_experts,
    summed_matrix,
    weight_factors,
)
from memplan.graph.replacing.stacked_targets import EXPERT_NAMES, as_stacked
from memplan.model.spec import ModelSpec, Task
from memplan.training.adapters import (
    ALL_LINEAR,
    EVERY_LINEAR,
    LINEAR_NAMES,
    Ia3,
    Lora,
    ModuleAdapter,
    TrainedBias,
)
from memplan.training.splitting.parallelism import TensorParallel

NO_RANKS: Ranks = {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adaptation:
    """An adapter laid over a model."""

    adapter: ModuleAdapter
    dtype: DType
    """Of its weights."""
    scaled_inputs: frozenset[str]
    """Modules whose input IA3 multiplies, by segment and name."""
    ranks: Mapping[str, tuple[Ranks, ...]]
    """For each segment's name, what is adapted in each of its repetitions."""
    saved: Mapping[str, tuple[frozenset[str], ...]]
    """For each segment's name, the modules of which a copy is trained."""
    absent: tuple[str, ...] = ()
    """Targets that are no module of the model's."""

    @property
    def num_prompts(self) -> int:
        """It has none."""
        return 0

    def prompted(self, t: Tape, x: Tensor) -> Tensor:  # noqa: ARG002
        """Tokens as they are."""
        return x

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
        bias = self.adapter.bias if isinstance(self.adapter, Lora) else TrainedBias.NONE
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
        adapter = self.adapter
        if isinstance(adapter, Ia3):
            if _place(t, module) in self.scaled_inputs:
                return out
            return multiplied_by(t, out, self.dtype, module, weight.matrix_shape[-2])
        down, up = low_rank(t, adapter, self.dtype, module, weight, t.adapted[module])
        if weight.packed is not None:
            from memplan.graph.replacing.quantized import (
                beside_packed,  # only where something is quantized
            )

            return beside_packed(t, adapter, x, out, weight, bias, (down, up))
        if adapter.dora:
            return beside_linear_dora(t, adapter, x, out, weight, bias, down, up)
        return beside_linear(t, adapter, x, out, down, up)

    def beside_share(
        self,
        t: Tape,
        group: TensorParallel,
        x: Tensor,
        out: Tensor,
        weight: Parameter,
        module: str,
        *,
        split: Split,
    ) -> Tensor:
        """Record what an adapted layer does with its result where ranks have shares of it.

        Beside columns peft gives every rank A whole and B's rows of its own (peft 0.21.2,
        ``add_lora_tp_hooks_dtensor``).
        """
        adapter, rank = self.adapter, t.adapted[module]
        if not isinstance(adapter, Lora) or adapter.dora:
            msg = "adapter: beside tensor_parallel only plain LoRA is modelled; leave tensor_parallel out"
            raise SetupError(msg)
        from memplan.graph.replacing.split_adapters import beside_split  # only then
        from memplan.graph.splitting.tensor_parallel import copied_to_ranks

        if group.splits_adapters:
            return beside_split(
                t, group, adapter, self.dtype, x, out, weight, module, rank=rank, split=split
            )
        down, up = low_rank(t, adapter, self.dtype, module, weight, rank)
        for each in up:
            each.ranks, each.is_distributed = group.degree, True
        return beside_linear(
            t, adapter, x, out, down, up, between=lambda narrow: copied_to_ranks(t, group, narrow)
        )

    def in_place_of(self, t: Tape, weight: Parameter) -> Tensor:
        """Record what is multiplied by in a weight's place: its sum with its own adapter's product."""
        factors = self._factors(t, weight)
        if factors is None:
            return weight
        return (summed_experts if len(weight.shape) > 2 else summed_matrix)(t, weight, *factors)

    def declare_on_weight(self, t: Tape, weight: Parameter) -> None:
        """Declare the adapter that stands on a counted weight itself, where there is one."""
        self._factors(t, weight)

    def _factors(self, t: Tape, weight: Parameter) -> tuple[Parameter, Parameter] | None:
        name = weight.name.removeprefix(f"{weight.module}.")
        key = weight_key(bare_module(weight.module), name)
        rank = t.adapted.get(key)
        if rank is None:
            return None
        if weight.packed is not None:
            msg = f"adapter: parameters: {weight.name} is quantized: name its module as a target"
            raise SetupError(msg)
        return weight_factors(t, self.dtype, weight, rank, adapter_module(t.adapted, key))

    def before_linear(self, t: Tape, x: Tensor, width: int, module: str) -> Tensor:
        """Record what an adapted linear layer does with its input."""
        if _place(t, module) not in self.scaled_inputs:
            return x
        return scaled_by(t, x, self.dtype, module, width)

    def beside_embedding(
        self, t: Tape, out: Tensor, weight: Parameter, ids: Tensor | None, module: str
    ) -> Tensor:
        """Record what an adapted embedding does with its result."""
        if isinstance(self.adapter, Ia3) or self.adapter.dora:
            msg = f"adapter: {module}: an embedding has LoRA alone; leave it out of the targets"
            raise SetupError(msg)
        return beside_embedding(
            t, self.dtype, out, weight, ids, module=module, rank=t.adapted[module]
        )

    def declare(self, t: Tape, weight: Parameter, module: str) -> None:
        """Declare the adapter of a module that is counted, not written down."""
        adapter = self.adapter
        if isinstance(adapter, Ia3):
            width = weight.matrix_shape[-1 if _place(t, module) in self.scaled_inputs else -2]
            name = f"{module}.ia3_l.default"
            t.parameter(name, width, dtype=self.dtype, module=module, of_adapter=True)
            return
        low_rank(t, adapter, self.dtype, module, weight, t.adapted[module])

    def cuts(self, name: str) -> set[int]:
        """Numbers of repetitions that are not adapted as the one before."""
        ranks, saved = self.ranks.get(name, ()), self.saved.get(name, ())
        return {
            number
            for number in range(1, max(len(ranks), len(saved)) + 1)
            if self.at(name, number) != self.at(name, number - 1)
            or saved[number : number + 1] != saved[number - 1 : number]
        }


def adapt(
    model: ModelSpec, plain: Tape, adapter: ModuleAdapter, dtype: DType, *, stacks: bool = True
) -> Adaptation:
    """Lay an adapter over a model; ``plain`` is its tape without one.

    ``stacks`` is whether names of experts' matrices mean the stacked weights, as peft takes them.

    Raises ``SetupError`` for modules that the model does not have, or that cannot be adapted.
    """
    modules = named_modules(model, plain)
    weights: list[NamedModule] = []
    named_experts = stacks and model.family in EXPERT_NAMES
    if isinstance(adapter, Lora) and (adapter.parameters or named_experts):
        named = named_weights(model, plain)
        asked, adapter = adapter, as_stacked(model.family, adapter, modules, named)
        weights = _chosen_weights(model, asked, adapter, named)
    chosen = list(_chosen(model, adapter, modules)) if _has_modules(adapter) else []
    if weights:
        _check_apart(chosen, weights)
        chosen += weights
    saved = [each for each in modules if _is_saved(model, each, adapter)]
    _check_saved(model, adapter, modules, saved)
    names = adapter.targets if isinstance(adapter.targets, tuple) else ()
    return Adaptation(
        adapter=adapter,
        dtype=dtype,
        absent=_absent(names, modules),
        scaled_inputs=_scaled_inputs(model, adapter, chosen),
        ranks={
            name: tuple({each.module: _rank_of(each, adapter) for each in row} for row in rows)
            for name, rows in _by_repetition(chosen).items()
        },
        saved={
            name: tuple(frozenset(each.module for each in row) for row in rows)
            for name, rows in _by_repetition(saved).items()
        },
    )


def _has_modules(adapter: ModuleAdapter) -> bool:
    """Whether modules are adapted, and not single weights alone (``target_parameters``)."""
    return not (isinstance(adapter, Lora) and adapter.targets == () and adapter.parameters)


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
    model: ModelSpec, adapter: ModuleAdapter, modules: tuple[NamedModule, ...]
) -> Iterator[NamedModule]:
    """The modules that the adapter stands on."""
    targets = adapter.targets
    if targets is None:
        targets = default_targets(model, modules, adapter)
    if targets in (ALL_LINEAR, EVERY_LINEAR, LINEAR_NAMES):
        _check_known(model)
        linear = [each for each in modules if each.kind is ModuleKind.LINEAR]
        wanted = [each for each in linear if targets == EVERY_LINEAR or not each.is_output]
    elif isinstance(targets, str):
        wanted = [each for each in modules if _is_meant(targets, each.name)]
        if not wanted:
            raise _unknown(model, targets, modules, "targets")
    else:
        wanted = []
        absent = _absent(targets, modules)
        if targets and len(absent) == len(targets):
            raise _unknown(model, absent[0], modules, "targets")
        wanted = [each for each in modules if any(_ends(each.name, name) for name in targets)]
    wanted = [each for each in wanted if not _is_left_alone(model, each, adapter)]
    if adapter.layers:
        if isinstance(adapter.targets, str) and adapter.targets != LINEAR_NAMES:
            msg = (
                "adapter: layers: peft takes them beside a list of targets, not beside "
                f"{adapter.targets!r} (LoraConfig's layers_to_transform): name the modules"
            )
            raise SetupError(msg)
        wanted = [each for each in wanted if _layer_of(each.name) in adapter.layers]
    for each in wanted:
        _check_kind(model, each)
        if isinstance(adapter, Lora):
            _check_mamba(model, each)
    has_weights = isinstance(adapter, Lora) and adapter.parameters
    if not wanted and not has_weights:
        msg = f"adapter: nothing of {model.name} is left to adapt: layers, exclude or modules_to_save take it all"
        raise SetupError(msg)
    yield from wanted


def _is_meant(pattern: str, name: str) -> bool:
    """Whether a pattern is a module's name, or the one that it had in transformers before 4.52."""
    older = re.sub(r"^model\.(vision_tower|audio_tower|multi_modal_projector)\.", r"\1.", name)
    older = re.sub(r"^model\.language_model\.", "language_model.model.", older)
    return any(_matches(pattern, each, "targets") for each in dict.fromkeys((name, older)))


def _absent(targets: tuple[str, ...], modules: tuple[NamedModule, ...]) -> tuple[str, ...]:
    """Targets that no module has; peft complains only where none has any (``inject_adapter``)."""
    return tuple(
        target for target in targets if not any(_ends(each.name, target) for each in modules)
    )


def _chosen_weights(
    model: ModelSpec, asked: Lora, lora: Lora, weights: tuple[NamedModule, ...]
) -> list[NamedModule]:
    """The weights that have an adapter of their own (``BaseTuner._inject_parameters``)."""
    for target in lora.parameters:
        if not any(_ends(each.name, target) for each in weights):
            known = sorted({".".join(each.name.split(".")[-2:]) for each in weights})
            guess = nearest(target, known)
            hint = f" Did you mean {guess!r}?" if guess else ""
            listed = f" It has {', '.join(known)}" if known else ""
            msg = (
                f"adapter: parameters: {model.name} has no weight {target!r} outside of embeddings.{hint}"
                f"{listed}"
            )
            raise SetupError(msg)
    if lora.parameters and asked.targets != LINEAR_NAMES:  # axolotl: the linear layers' alone
        _check_multiplied_out(lora)
    return [each for each in weights if any(_ends(each.name, name) for name in lora.parameters)]


def _check_apart(chosen: list[NamedModule], weights: list[NamedModule]) -> None:
    """Refuse a weight whose module is adapted too."""
    names = {each.name for each in chosen}
    for each in weights:
        if each.name.rpartition(".")[0] in names:
            msg = (
                f"adapter: parameters: the module of {each.name} is a target too: name one of them"
            )
            raise SetupError(msg)


def _check_multiplied_out(lora: Lora) -> None:
    """Refuse what peft's ``ParamWrapper`` refuses."""
    for name, value in (
        ("dropout", lora.dropout),
        ("dora", lora.dora),
        ("lora_bias", lora.lora_bias),
    ):
        if value:
            msg = (
                f"adapter: {name}: peft has none for adapters on weights, as those of all experts in one "
                f"are ({', '.join(lora.parameters)}): leave it out, or name attention's modules alone"
            )
            raise SetupError(msg)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _matches(pattern: str, name: str, field: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        msg = f"adapter: {field}: {pattern!r} is no pattern: {error}"
        raise SetupError(msg) from error


def _is_left_alone(model: ModelSpec, each: NamedModule, adapter: ModuleAdapter) -> bool:
    exclude = adapter.exclude
    if isinstance(exclude, str):
        excluded = _matches(exclude, each.name, "exclude")
    else:
        excluded = any(_ends(each.name, name) for name in exclude)
    return excluded or _is_saved(model, each, adapter)


TASK_HEADS: Mapping[Task, tuple[str, ...]] = {
    Task.SEQUENCE_CLASSIFICATION: ("classifier", "score"),
    Task.TOKEN_CLASSIFICATION: ("classifier", "score"),
    Task.QUESTION_ANSWERING: ("qa_outputs",),
}
"""Heads that peft trains whole beside every adapter (``peft_model.py``, ``PeftModelFor...``)."""


def _is_saved(model: ModelSpec, each: NamedModule, adapter: ModuleAdapter) -> bool:
    """It is, or stands in, a module of which a copy is trained."""
    names = (*adapter.modules_to_save, *TASK_HEADS.get(model.task, ()))
    return any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", each.name) for name in names)


def _check_saved(
    model: ModelSpec,
    adapter: ModuleAdapter,
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


def _rank_of(each: NamedModule, adapter: ModuleAdapter) -> int:
    """The rank of the first pattern that ends its name (``get_pattern_key``)."""
    if isinstance(adapter, Ia3):
        return 1
    for pattern, rank in dict(adapter.rank_pattern).items():
        if re.match(rf"(.*\.)?({pattern})$", each.name):
            return rank
    return adapter.rank


def _scaled_inputs(
    model: ModelSpec, adapter: ModuleAdapter, chosen: list[NamedModule]
) -> frozenset[str]:
    """IA3's feed-forward modules (``IA3Model._check_target_module_feedforward``)."""
    if not isinstance(adapter, Ia3):
        return frozenset()
    names = adapter.feedforward
    if names is None:
        names = IA3_FEEDFORWARD.get(model.family, ())
    return frozenset(
        f"{each.segment} {each.module}"
        for each in chosen
        if any(_ends(each.name, name) for name in names)
    )


def _place(t: Tape, module: str) -> str:
    return f"{t.segment.name} {module}"


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


PARTLY_KNOWN = frozenset({
    "convbert", "d_fine", "flava", "fsmt", "fuyu", "luke", "lxmert", "reformer", "seamless_m4t",
    "zamba",
})  # fmt: skip
"""Types some of whose linear layers are not modules here: grouped, shared or tied ones."""


def _check_known(model: ModelSpec) -> None:
    if model.family in PARTLY_KNOWN:
        msg = (
            f"adapter: targets: memplan does not know each linear layer of {model.family} as a module of its "
            "own, so all-linear would be counted wrong: name the modules"
        )
        raise SetupError(msg)


MAMBA_TYPES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Types whose kernels read these modules' weights themselves, so that peft refuses to adapt them."""
MAMBA_MODULES = frozenset({"conv1d", "out_proj"})


def _check_mamba(model: ModelSpec, each: NamedModule) -> None:
    """Refuse what peft refuses (``_check_lora_target_modules_mamba``)."""
    leaf = each.name.rpartition(".")[2]
    if model.family in MAMBA_TYPES and leaf in MAMBA_MODULES:
        msg = (
            f"adapter: targets: peft refuses {leaf} of {model.family}, whose weight Mamba's kernels read "
            "by themselves: leave it out of the targets (exclude)"
        )
        raise SetupError(msg)


def default_targets(
    model: ModelSpec, modules: tuple[NamedModule, ...], adapter: ModuleAdapter
) -> tuple[str, ...] | str:
    """peft's own targets for a model's type; none where weights are named and it has none.

    Raises ``SetupError`` for a type it has none for.
    """
    found = usual_targets(model, adapter)
    if found is None and isinstance(adapter, Lora) and adapter.parameters:
        return ()
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


def usual_targets(model: ModelSpec, adapter: object) -> tuple[str, ...] | str | None:
    """The modules that peft adapts where none are named; None where it has none for the type."""
    if isinstance(adapter, Ia3):
        return IA3_TARGETS.get(model.family)
    return DEFAULT_TARGETS.get(model.family) or SCRIPT_TARGETS.get(model.family)


_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_BOTH_STREAMS = (
    "attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0",
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
SCRIPT_TARGETS: Mapping[str, tuple[str, ...]] = {
    "CogVideoXTransformer3DModel": _ATTENTION,
    "QwenImageTransformer2DModel": _ATTENTION,
    "SD3Transformer2DModel": _BOTH_STREAMS,
    "FluxTransformer2DModel": (
        *_BOTH_STREAMS, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ),
}  # fmt: skip
"""Targets that diffusers' training scripts take where none are named (``train_dreambooth_lora_*.py``,
``train_cogvideox_lora.py``)."""

_QUERY_VALUE = ("q_proj", "v_proj")
_BERT = ("query", "value")
DEFAULT_TARGETS: Mapping[str, tuple[str, ...] | str] = {
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    **dict.fromkeys(
        ("bart", "opt", "gptj", "gpt_neo", "llama", "llama4", "mistral", "stablelm",
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

IA3_FEEDFORWARD: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama", "llama4", "mistral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"),
        ("down_proj",),
    ),
    **dict.fromkeys(("opt", "bart", "phi"), ("fc2",)),
    **dict.fromkeys(("roberta", "bert", "deberta-v2", "deberta"), ("output.dense",)),
    **dict.fromkeys(("gpt_neox", "falcon"), ("dense_4h_to_h",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("mlp.c_proj",)),
    "t5": ("wo",), "mt5": (), "bloom": ("mlp.dense_4h_to_h",), "gptj": ("fc_out",),
    "gpt_neo": ("c_proj",),
}  # fmt: skip
"""Those of IA3's targets whose input is multiplied, where none are named."""
IA3_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral"), ("k_proj", "v_proj", "down_proj")),
    **dict.fromkeys(
        ("llama4", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"),
        ("q_proj", "v_proj", "down_proj"),
    ),
    **dict.fromkeys(("roberta", "bert"), ("key", "value", "output.dense")),
    **dict.fromkeys(("gpt_neox", "falcon"), ("query_key_value", "dense_4h_to_h")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn", "mlp.c_proj")),
    "t5": ("k", "v", "wo"), "mt5": ("k", "v", "wi_1"),
    "bloom": ("query_key_value", "mlp.dense_4h_to_h"), "opt": ("q_proj", "k_proj", "fc2"),
    "gptj": ("q_proj", "v_proj", "fc_out"), "gpt_neo": ("q_proj", "v_proj", "c_proj"),
    "bart": ("q_proj", "v_proj", "fc2"), "deberta-v2": ("key_proj", "value_proj", "output.dense"),
    "deberta": ("in_proj", "output.dense"), "phi": ("q_proj", "v_proj", "fc2"),
}  # fmt: skip
"""IA3's targets where none are named (``peft/utils/constants.py``)."""
