"""Adapters: what is trained of a model whose own weights are frozen, as peft 0.21 names it.

Pure data. Which modules of a model an adapter stands on, and what it records there, is
``memplan.graph.replacing.adapters``'s business.

References
----------
.. [1] E. J. Hu et al., "LoRA: Low-rank adaptation of large language models," ICLR 2022.
   arXiv:2106.09685.
.. [2] D. Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA," 2023.
   arXiv:2312.03732.
.. [3] S.-Y. Liu et al., "DoRA: Weight-decomposed low-rank adaptation," ICML 2024.
   arXiv:2402.09353.
.. [4] H. Liu et al., "Few-shot parameter-efficient fine-tuning is better and cheaper than in-context
   learning," NeurIPS 2022. arXiv:2205.05638.
.. [5] B. Lester, R. Al-Rfou, and N. Constant, "The power of scale for parameter-efficient prompt
   tuning," EMNLP 2021. arXiv:2104.08691; P-tuning: X. Liu et al., arXiv:2103.10385.
"""

from collections.abc import Mapping
from enum import Enum

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass, fields
from memplan.text import shown

ALL_LINEAR = "all-linear"
"""Every linear layer but the output matrix (peft's ``INCLUDE_LINEAR_LAYERS_SHORTHAND``)."""
EVERY_LINEAR = "every-linear"
"""The same with the output matrix (NeMo's ``match_all_linear``)."""
LINEAR_NAMES = "linear-names"
"""The names of linear modules that a script goes through (axolotl, ``find_all_linear_names``; LLaMA-Factory,
``find_all_linear_modules``): experts that are one weight are no module, and have no adapter."""
MAX_RANK = 1_000_000


class AdapterDtype(Enum):
    """What an adapter's weights are held in, where the engine does not say."""

    FP32 = "fp32"
    """What peft casts them to (``autocast_adapter_dtype``)."""
    BF16 = "bf16"
    """As the base they stand on, where that is in bf16."""
    FP16 = "fp16"

    @property
    def format(self) -> DType:
        """The number format."""
        return DType[self.name]


class TrainedBias(Enum):
    """Which of the model's own biases are trained too."""

    NONE = "none"
    ALL = "all"
    LORA_ONLY = "lora_only"
    """Those of the modules that are adapted."""


DEFAULT_ALPHA = 8
"""``peft.LoraConfig``'s scale over the rank, where none is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters beside linear layers (``peft.LoraConfig``) [1]_.

    Raises ``SetupError`` for values that cannot be.

    >>> str(Lora(rank=16, targets=("q_proj", "v_proj")))
    'LoRA rank 16 on q_proj, v_proj'
    """

    rank: int = 8
    """Columns of A and rows of B (peft's ``r``)."""
    alpha: float | None = None
    """Scale over the rank: it changes no bytes. None: peft's 8."""
    targets: tuple[str, ...] | str | None = None
    """Names of modules, or the ends of them; as one text a pattern for whole names, ``all-linear``
    (``every-linear``: the head too) or ``linear-names``. None: peft's own choice for the model's type."""
    parameters: tuple[str, ...] = ()
    """Ends of names of single weights, such as all experts' in one, each with an adapter that is
    multiplied out and added to it (``target_parameters``)."""
    exclude: tuple[str, ...] | str = ()
    """Names of modules, or a pattern, that are left alone all the same (``exclude_modules``)."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that are adapted (``layers_to_transform``); by default all."""
    rank_pattern: tuple[tuple[str, int], ...] | Mapping[str, int] = ()
    """Ranks of modules whose names end in a pattern."""
    dropout: float = 0.0
    """Of what A is given."""
    dtype: AdapterDtype = AdapterDtype.FP32
    """Of the adapters' weights where the engine keeps more than one format."""
    bias: TrainedBias = TrainedBias.NONE
    lora_bias: bool = False
    """B has a bias of its own."""
    rslora: bool = False
    """The scale is over the rank's root [2]_: it changes no bytes."""
    dora: bool = False
    """Each output has a trained magnitude beside its direction [3]_."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a copy is trained in full, beside the frozen one."""

    def __post_init__(self) -> None:
        _set(self, "targets", _names_or_pattern(self.targets, "targets"))
        _set(self, "exclude", _names_or_pattern(self.exclude, "exclude") or ())
        _set(self, "parameters", _names(self.parameters, "parameters"))
        _set(self, "layers", _numbers(self.layers))
        _set(self, "rank_pattern", _ranks(self.rank_pattern))
        _set(self, "modules_to_save", _names(self.modules_to_save, "modules_to_save"))
        if not self.parameters:
            _check_targets(self.targets)
        _set(self, "dtype", _member(self.dtype, AdapterDtype, "dtype"))
        _set(self, "bias", _member(self.bias, TrainedBias, "bias"))
        _check_rank(self.rank, "rank")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            msg = f"adapter: dropout: must be from 0 to below 1, got {shown(self.dropout)}"
            raise SetupError(msg)
        if self.alpha is not None and not _is_number(self.alpha):
            msg = f"adapter: alpha: expected a number, got {shown(self.alpha)}"
            raise SetupError(msg)
        for name in ("rslora", "dora", "lora_bias"):
            if not isinstance(getattr(self, name), bool):
                msg = f"adapter: {name}: expected true or false, got {shown(getattr(self, name))}"
                raise SetupError(msg)

    def __str__(self) -> str:
        kind = "DoRA" if self.dora else "rsLoRA" if self.rslora else "LoRA"
        modules = f" on {targets_text(self.targets)}" if self.targets or not self.parameters else ""
        parts = [f"{kind} rank {self.rank}{modules}"]
        if self.exclude:
            parts.append(f"but not {targets_text(self.exclude)}")
        if self.parameters:
            parts.append(f"on weights {', '.join(self.parameters)}")
        if self.layers:
            parts.append(f"layers {', '.join(map(str, self.layers))}")
        parts += [f"rank {rank} on {pattern}" for pattern, rank in dict(self.rank_pattern).items()]
        if self.lora_bias:
            parts.append("B with a bias")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        if self.dtype is not AdapterDtype.FP32:
            parts.append(self.dtype.value)
        if self.bias is not TrainedBias.NONE:
            parts.append(f"bias {self.bias.value}")
        if self.modules_to_save:
            parts.append(f"trains {', '.join(self.modules_to_save)} whole")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ia3:
    """A trained factor on what linear layers give, or are given (``peft.IA3Config``) [4]_.

    Raises ``SetupError`` for values that cannot be.

    >>> str(Ia3(targets=("k_proj", "down_proj"), feedforward=("down_proj",)))
    'IA3 on k_proj, down_proj'
    """

    targets: tuple[str, ...] | str | None = None
    """As a ``Lora``'s."""
    feedforward: tuple[str, ...] | None = None
    """Those of them whose input is multiplied, not their result. None: peft's for the model's type."""
    exclude: tuple[str, ...] | str = ()
    dtype: AdapterDtype = AdapterDtype.FP32
    """Of the factors where the engine keeps more than one format."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a copy is trained in full, beside the frozen one."""

    def __post_init__(self) -> None:
        _set(self, "targets", _names_or_pattern(self.targets, "targets"))
        _check_targets(self.targets)
        if self.feedforward is not None:
            _set(self, "feedforward", _names(self.feedforward, "feedforward"))
        _set(self, "exclude", _names_or_pattern(self.exclude, "exclude") or ())
        _set(self, "modules_to_save", _names(self.modules_to_save, "modules_to_save"))
        _set(self, "dtype", _member(self.dtype, AdapterDtype, "dtype"))

    @property
    def layers(self) -> tuple[int, ...]:
        """It is of all layers."""
        return ()

    def __str__(self) -> str:
        parts = [f"IA3 on {targets_text(self.targets)}"]
        if self.dtype is not AdapterDtype.FP32:
            parts.append(self.dtype.value)
        if self.modules_to_save:
            parts.append(f"trains {', '.join(self.modules_to_save)} whole")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTuning:
    """Trained tokens before every sequence (``peft.PromptTuningConfig``) [5]_.

    With ``hidden_size`` they pass a network of three linear layers first: ``PromptEncoderConfig``'s
    P-tuning. Raises ``SetupError`` for values that cannot be.

    >>> str(PromptTuning(tokens=20))
    'prompt tuning of 20 tokens'
    """

    tokens: int = 20
    """How many (``num_virtual_tokens``)."""
    hidden_size: int | None = None
    """Width of P-tuning's network (``encoder_hidden_size``). None: there is none."""

    def __post_init__(self) -> None:
        _check_rank(self.tokens, "tokens")
        if self.hidden_size is not None:
            _check_rank(self.hidden_size, "hidden_size")

    @property
    def dtype(self) -> AdapterDtype:
        """peft makes them in fp32, whatever the model is."""
        return AdapterDtype.FP32

    def __str__(self) -> str:
        if self.hidden_size is None:
            return f"prompt tuning of {self.tokens} tokens"
        return f"P-tuning of {self.tokens} tokens, width {self.hidden_size}"


ModuleAdapter = Lora | Ia3
"""Adapters that stand on modules."""
Adapter = Lora | Ia3 | PromptTuning
"""What a setup's ``adapter`` may be."""

KINDS: Mapping[str, type[Lora] | type[Ia3] | type[PromptTuning]] = {
    "lora": Lora, "ia3": Ia3, "prompt": PromptTuning,
}  # fmt: skip
"""Names of adapters as a setup file has them."""


def targets_text(targets: tuple[str, ...] | str | None) -> str:
    """Which modules are meant, in words."""
    if targets is None:
        return "peft's choice of modules"
    return targets if isinstance(targets, str) else ", ".join(targets)


def read_adapter(value: object) -> Adapter | None:
    """An adapter out of a mapping: its kind, and under it its fields, or its rank alone.

    Raises ``SetupError`` for kinds and fields that do not exist.

    >>> read_adapter({"lora": {"rank": 4, "targets": ["q_proj"]}}).targets
    ('q_proj',)
    >>> read_adapter({"lora": 16}).rank
    16
    """
    if value is None or value == "none" or isinstance(value, Adapter):
        return None if isinstance(value, str) else value
    if isinstance(value, str) and value in KINDS:
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        msg = f"adapter: expected one kind and its settings, such as lora: {{rank: 16}}, got {shown(value)}"
        raise SetupError(msg)
    ((name, settings),) = value.items()
    kind = KINDS.get(name)
    if kind is None:
        hint = did_you_mean(str(name), list(KINDS)) or f" There are: {', '.join(KINDS)}"
        msg = f"adapter: {shown(name)} is no kind of adapter.{hint}"
        raise SetupError(msg)
    if isinstance(settings, int) and not isinstance(settings, bool) and name in _SHORT_FIELD:
        settings = {_SHORT_FIELD[name]: settings}
    if settings is None:
        settings = {}
    if not isinstance(settings, Mapping):
        msg = f"adapter: {name}: expected its settings as a mapping, got {shown(settings)}"
        raise SetupError(msg)
    known = [each.name for each in fields(kind)]
    for key in settings:
        if key not in known:
            hint = did_you_mean(str(key), known) or f" There are: {', '.join(known)}"
            msg = f"adapter: {name}: {key}: no such setting.{hint}"
            raise SetupError(msg)
    return kind(**settings)


_SHORT_FIELD = {"lora": "rank", "prompt": "tokens"}
"""What a number alone says of a kind."""


def _set(adapter: object, name: str, value: object) -> None:
    object.__setattr__(adapter, name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_rank(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        msg = f"adapter: {name}: must be a whole number from 1 to {MAX_RANK}, got {shown(value)}"
        raise SetupError(msg)


def _names_or_pattern(value: object, name: str) -> tuple[str, ...] | str | None:
    if value is None or (isinstance(value, str) and value):
        word = value.lower() if isinstance(value, str) else value
        return word if word in (ALL_LINEAR, EVERY_LINEAR) else value
    return _names(value, name)


def _check_targets(targets: object) -> None:
    if targets == ():
        msg = "adapter: targets: expected names of modules, or all-linear, got none"
        raise SetupError(msg)


def _names(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset) or not all(
        isinstance(each, str) and each for each in value
    ):
        msg = f"adapter: {name}: expected names of modules, got {shown(value)}"
        raise SetupError(msg)
    ordered = sorted(value) if isinstance(value, set | frozenset) else value
    return tuple(dict.fromkeys(ordered))


def _numbers(value: object) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value,)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value
    ):
        msg = f"adapter: layers: expected numbers of layers, counted from 0, got {shown(value)}"
        raise SetupError(msg)
    return tuple(sorted(set(value)))


def _ranks(value: object) -> tuple[tuple[str, int], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value or ()
    found = []
    for pair in pairs if isinstance(pairs, list | tuple) else (pairs,):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            msg = f"adapter: rank_pattern: expected a rank for each pattern, got {shown(value)}"
            raise SetupError(msg)
        _check_rank(pair[1], f"rank_pattern: {pair[0]}")
        found.append(pair)
    return tuple(found)


def _member(value: object, kind: type[Enum], name: str) -> Enum:
    if isinstance(value, kind):
        return value
    known = [str(each.value) for each in kind]
    if value not in known:
        hint = did_you_mean(str(value), known)
        msg = f"adapter: {name}: {shown(value)} is not one of {', '.join(known)}.{hint}"
        raise SetupError(msg)
    return kind(value)
