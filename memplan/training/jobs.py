"""Jobs: what a training step computes, and which models take part beside the one that is trained.

Pure data. A job says which other models there are, whether they are frozen, and which passes a step makes
over which rows; ``memplan.estimator.others`` lays them out, ``memplan.memory.beside`` runs them.

References
----------
.. [1] R. Rafailov et al., "Direct preference optimization," NeurIPS 2023. arXiv:2305.18290.
.. [2] J. Hong, N. Lee, J. Thorne, "ORPO," EMNLP 2024. arXiv:2403.07691.
.. [3] Z. Shao et al., "DeepSeekMath" (GRPO), 2024. arXiv:2402.03300.
.. [4] R. Agarwal et al., "On-policy distillation of language models" (GKD), ICLR 2024.
   arXiv:2306.13649.
.. [5] TRL 1.16 (``trainer/dpo_trainer.py``, ``grpo_trainer.py``, ``experimental/gkd`` and so on), which
   these follow where nothing else is said.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from typing import Any, TypeVar

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass, fields
from memplan.model.spec import ModelSpec
from memplan.text import shown
from memplan.training.choices import Recomputation
from memplan.training.objectives import LogProbabilities, Objective


class JobKind(StrEnum):
    """What is trained for."""

    SFT = "sft"
    """The model's own task: for a language model the next token."""
    DPO = "dpo"
    """Chosen and rejected answers in one batch, against a reference [1]_."""
    ORPO = "orpo"
    """The same without a reference, beside the likelihood of the chosen ones [2]_."""
    CPO = "cpo"
    """The same (TRL's ``CPOTrainer`` with its default ``cpo_alpha``)."""
    SIMPO = "simpo"
    """Log-probabilities alone, without a reference."""
    KTO = "kto"
    """Single answers against a reference, with mismatched ones for the KL term."""
    REWARD = "reward"
    """A scalar head over chosen and rejected answers."""
    DISTILLATION = "distillation"
    """The distance of all the teacher's logits [4]_."""
    PPO = "ppo"
    """A policy, a critic that is trained on its own, a frozen reference and reward model."""
    GRPO = "grpo"
    """Groups of completions, scored by functions [3]_."""


class OtherModel(Enum):
    """A model beside the trained one, where it is not named."""

    NONE = "none"
    SAME = "same"
    """A frozen copy of the model as it is before training."""
    ADAPTER_OFF = "adapter-off"
    """The model itself with its adapter switched off: no second copy."""
    PRECOMPUTED = "precomputed"
    """What it would say was computed beforehand."""


class Rollout(Enum):
    """Who generates completions."""

    NONE = "none"
    """They are there: generated beforehand, or elsewhere."""
    HF = "hf"
    """transformers' ``generate`` with the model itself, and a cache of keys and values."""
    VLLM = "vllm"
    """vLLM on the same cards, with a share of each."""
    SGLANG = "sglang"
    """SGLang on the same cards, with a share of each."""
    SERVER = "server"
    """An engine on other cards."""


class FrozenUnits(Enum):
    """What FSDP2 shards a frozen model in."""

    WHOLE = "whole"
    """All of it at once, gathered while it runs (TRL 1.16, ``prepare_fsdp``)."""
    LAYERS = "layers"
    """Each layer, as the trained model (torchtune)."""


class Leaving(Enum):
    """What of the trained model goes to CPU RAM while completions are generated."""

    NONE = "none"
    PARAMETERS = "parameters"
    """verl's ``param_offload``."""
    STATES = "optimizer-states"
    """verl's ``optimizer_offload``."""
    ALL = "all"
    """Both."""

    @property
    def parameters(self) -> bool:
        """Whether its weights go."""
        return self in (Leaving.PARAMETERS, Leaving.ALL)

    @property
    def states(self) -> bool:
        """Whether the optimizer's states go."""
        return self in (Leaving.STATES, Leaving.ALL)


COLOCATED = (Rollout.VLLM, Rollout.SGLANG)
"""Engines that take a share of the trained model's own cards."""

Other = OtherModel | ModelSpec | str
"""A model beside the trained one: a member, a spec, or a name that has yet to be looked up."""

ROLES = ("reference", "teacher", "critic", "reward")
"""Fields that name another model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a step trains for, and with whom.

    Raises ``SetupError`` for values that cannot be, and for settings that the kind of job does not
    have.

    >>> job = Job.read("grpo:rollout=vllm,gpu_memory_utilization=0.3,sleep=2")
    >>> job.kind.value, job.rollout.value, job.sleep
    ('grpo', 'vllm', 2)
    >>> Job.read({"kind": "dpo", "reference": "precomputed"}).reference.value
    'precomputed'
    """

    kind: JobKind = JobKind.SFT
    reference: Other | None = None
    """None: ``same``, or with an adapter ``adapter-off``, where the kind has one; GRPO: ``none``, as
    TRL's ``beta`` is 0."""
    teacher: Other | None = None
    """None: ``same``."""
    critic: Other | None = None
    """Trained on its own, before the policy. None: ``same``."""
    reward: Other | None = None
    """PPO's. None: ``same``; GRPO: ``none``, functions score its completions."""
    frozen_dtype: DType | None = None
    """What frozen models are loaded in. None: as the trained one's weights."""
    frozen_units: FrozenUnits = FrozenUnits.WHOLE
    """What FSDP2 shards them in; under other engines it changes nothing."""
    frozen_offload: bool = False
    """Frozen models lie in CPU RAM and come unit by unit, under FSDP (verl's reference)."""
    log_probabilities: LogProbabilities = LogProbabilities.ROWWISE
    """How log-probabilities come from logits."""
    completion_length: int | None = None
    """Tokens at the end of each sequence that were generated. None: half of the sequence, for kinds that
    generate [tokens]."""
    scored_length: int | None = None
    """Tokens at the end of each sequence that have logits. None: those that were generated (TRL); verl computes all [tokens]."""
    longest_completion: int | None = None
    """Tokens of a step's longest completion, which all wait for. None: all are as long as ``completion_length``."""
    rollout: Rollout | None = None
    """None: ``hf`` for kinds that generate."""
    scoring_batch_size: int | None = None
    """Sequences whose log-probabilities are computed at once before the step (verl's
    ``log_prob_micro_batch_size_per_gpu``). None: a micro-batch."""
    critic_batch_size: int | None = None
    """Sequences of the critic's own micro-batches. None: as the trained model's."""
    critic_checkpointing: Recomputation | None = None
    """Which activations of the critic's are computed again. None: as the trained model's."""
    leaves: Leaving = Leaving.NONE
    """What goes to CPU RAM while completions are generated, and comes back to be trained."""
    rollout_batch_size: int | None = None
    """Sequences that are generated at once on a rank. None: those of an optimizer step."""
    gpu_memory_utilization: float | None = None
    """Share of the card that a colocated rollout engine takes. None: 0.3, as TRL."""
    sleep: int = 0
    """Level at which it sleeps while the model is trained: 0 never, 1 its weights on the CPU, 2 dropped.
    Asleep it holds nothing of the card."""
    generate_batch_size: int | None = None
    """Sequences generated at once in evaluation (``predict_with_generate``); None: none."""

    def __post_init__(self) -> None:
        for name, kind in _MEMBERS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _member(value, kind, name))
        for name in ROLES:
            object.__setattr__(self, name, _other(getattr(self, name), name))
        object.__setattr__(self, "frozen_dtype", _dtype(self.frozen_dtype))
        for name in _COUNTS:
            _check_count(getattr(self, name), name, least=0 if name in _FROM_ZERO else 1)
        if self.sleep > 2:
            msg = f"job: sleep: must be 0, 1 or 2, got {self.sleep}"
            raise SetupError(msg)
        share = self.gpu_memory_utilization
        if share is not None and not _is_share(share):
            msg = f"job: gpu_memory_utilization: must be above 0 and below 1, got {shown(share)}"
            raise SetupError(msg)
        if not isinstance(self.frozen_offload, bool):
            msg = f"job: frozen_offload: write true or false, not {shown(self.frozen_offload)}"
            raise SetupError(msg)
        self._check_kind()

    def _check_kind(self) -> None:
        """Refuse what this kind of job does not have."""
        has = _HAS[self.kind]
        for name in (*ROLES, *_GENERATION, *_OF_CRITIC):
            given = getattr(self, name)
            if given not in (None, 0, Leaving.NONE) and name not in has:
                kinds = ", ".join(kind for kind, names in _HAS.items() if name in names)
                msg = f"job: {name}: {self.kind} has none; it is a setting of {kinds}"
                raise SetupError(msg)
        for name in ("teacher", "critic", "reward"):
            if getattr(self, name) in (OtherModel.ADAPTER_OFF, OtherModel.PRECOMPUTED):
                msg = f"job: {name}: is same, none or a model, got {getattr(self, name).value}"
                raise SetupError(msg)
        if self.log_probabilities is LogProbabilities.FUSED and self.kind not in _FUSIBLE:
            msg = (
                f"job: log_probabilities: {self.kind} has no fused ones; it is a setting of "
                f"{', '.join(_FUSIBLE)}"
            )
            raise SetupError(msg)
        engine = self.rollout
        if engine not in COLOCATED:
            for name in ("gpu_memory_utilization", "sleep", "leaves"):
                if getattr(self, name) not in (None, 0, Leaving.NONE):
                    msg = f"job: {name}: only a colocated rollout engine has it: rollout=vllm or sglang"
                    raise SetupError(msg)

    @classmethod
    def read(cls, value: object) -> "Job":
        """A job out of a kind's name, ``kind:key=value,...``, a mapping, or a job itself.

        Raises ``SetupError`` for kinds and settings that do not exist.
        """
        if isinstance(value, Job):
            return value
        if isinstance(value, Mapping):
            given = dict(value)
        elif isinstance(value, str):
            given = _pairs(value)
        else:
            msg = f"job: expected a kind such as dpo, or a mapping with one, got {shown(value)}"
            raise SetupError(msg)
        names = [each.name for each in fields(cls)]
        for name in given:
            if name in ("eval_batch_size", "eval_batches_kept"):
                value = shown(given[name])
                msg = f"job: {name}: evaluation is a setting of its own: `evaluation={value}`"
                if name == "eval_batches_kept":
                    msg = f"job: {name}: evaluation is a setting of its own, which takes batches_kept={value}"
                raise SetupError(msg)
            if name not in names:
                hint = did_you_mean(str(name), names)
                msg = f"job: {shown(name)}: no such setting.{hint} There are: {', '.join(names)}"
                raise SetupError(msg)
        return cls(**{name: each for name, each in given.items() if each is not None})

    @property
    def is_plain(self) -> bool:
        """Nothing but the model's own task."""
        return self == PLAIN

    @property
    def sequences_per_example(self) -> int:
        """Sequences that one example of the batch makes: chosen and rejected, or one."""
        return 2 if self.kind in PAIRED else 1

    @property
    def objective(self) -> Objective:
        """What the loss is computed from."""
        return _OBJECTIVES.get(self.kind, Objective.TASK)

    @property
    def switches_dropout_off(self) -> bool:
        """Its trainer sets every dropout to 0 unless told otherwise."""
        return self.kind in (JobKind.DPO, JobKind.KTO, JobKind.ORPO, JobKind.CPO, JobKind.SIMPO)

    @property
    def generates(self) -> bool:
        """Its completions come out of the trained model itself."""
        return self.kind in (JobKind.PPO, JobKind.GRPO)

    @property
    def chosen_rollout(self) -> Rollout:
        """Who generates, the default filled in."""
        if self.rollout is not None:
            return self.rollout
        return Rollout.HF if self.generates else Rollout.NONE

    @property
    def rollout_share(self) -> float:
        """Share of the card that a colocated engine takes, the default filled in; 0: none."""
        if self.chosen_rollout not in COLOCATED:
            return 0.0
        return self.gpu_memory_utilization or DEFAULT_SHARE

    def other(self, role: str, *, has_adapter: bool) -> Other:
        """The model of a role, the default filled in."""
        if role not in _HAS[self.kind]:
            return OtherModel.NONE
        given: Other | None = getattr(self, role)
        if given is not None:
            return given
        if self.kind is JobKind.GRPO:
            return OtherModel.NONE
        if role == "reference" and has_adapter:
            return OtherModel.ADAPTER_OFF
        return OtherModel.SAME

    def with_models(self, models: Mapping[str, ModelSpec]) -> "Job":
        """With names replaced by what they name."""
        from dataclasses import replace

        changes: dict[str, Any] = {
            role: models[name]
            for role in ROLES
            if isinstance(name := getattr(self, role), str) and name in models
        }
        return replace(self, **changes) if changes else self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of models that have yet to be looked up."""
        return tuple(name for role in ROLES if isinstance(name := getattr(self, role), str))

    def __str__(self) -> str:
        parts = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "kind" and value != each.default:
                parts.append(f"{each.name}={_plain(value)}")
        return f"{self.kind}:{','.join(parts)}" if parts else str(self.kind)


DEFAULT_SHARE = 0.3
"""Of the card, for a colocated vLLM (TRL 1.16, ``GRPOConfig.vllm_gpu_memory_utilization``)."""
_FUSIBLE = (JobKind.DPO, JobKind.KTO, JobKind.SIMPO, JobKind.PPO, JobKind.GRPO)
"""Kinds whose log-probabilities can come out of the fused head."""
PAIRED = (JobKind.DPO, JobKind.ORPO, JobKind.CPO, JobKind.SIMPO, JobKind.REWARD)
"""Kinds whose examples are pairs, concatenated."""

_OBJECTIVES: Mapping[JobKind, Objective] = {
    JobKind.DPO: Objective.PREFERENCE,
    JobKind.KTO: Objective.PREFERENCE,
    JobKind.SIMPO: Objective.PREFERENCE,
    JobKind.ORPO: Objective.LIKELIHOOD_AND_PREFERENCE,
    JobKind.CPO: Objective.LIKELIHOOD_AND_PREFERENCE,
    JobKind.DISTILLATION: Objective.DIVERGENCE,
    JobKind.PPO: Objective.POLICY_GRADIENT,
    JobKind.GRPO: Objective.POLICY_GRADIENT,
}
_GENERATION = (
    "completion_length", "scored_length", "longest_completion", "rollout", "rollout_batch_size", "gpu_memory_utilization", "sleep",
    "scoring_batch_size", "leaves",
)  # fmt: skip
_OF_CRITIC = ("critic_batch_size", "critic_checkpointing")
_HAS: Mapping[JobKind, tuple[str, ...]] = {
    JobKind.SFT: (),
    JobKind.DPO: ("reference",),
    JobKind.ORPO: (),
    JobKind.CPO: (),
    JobKind.SIMPO: (),
    JobKind.KTO: ("reference",),
    JobKind.REWARD: (),
    JobKind.DISTILLATION: ("teacher",),
    JobKind.PPO: ("reference", "critic", *_OF_CRITIC, "reward", *_GENERATION),
    JobKind.GRPO: ("reference", "reward", *_GENERATION),
}
"""Settings that not every kind has."""
_MEMBERS: Mapping[str, type[Enum]] = {
    "kind": JobKind, "log_probabilities": LogProbabilities, "rollout": Rollout, "frozen_units": FrozenUnits,
    "leaves": Leaving, "critic_checkpointing": Recomputation,
}  # fmt: skip
_COUNTS = (
    "completion_length", "scored_length", "longest_completion", "rollout_batch_size", "sleep", "generate_batch_size",
    "scoring_batch_size", "critic_batch_size",
)  # fmt: skip
_FROM_ZERO = frozenset({"sleep"})
MAX_COUNT = 2**31

_Kind = TypeVar("_Kind", bound=Enum)


def _member(value: object, kind: type[_Kind], name: str) -> _Kind:
    if isinstance(value, kind):
        return value
    members = {str(each.value): each for each in kind}
    found = members.get(str(value).lower())
    if found is None:
        hint = did_you_mean(str(value), list(members))
        msg = f"job: {name}: {shown(value)} is not one of {', '.join(members)}.{hint}"
        raise SetupError(msg)
    return found


def _other(value: object, name: str) -> Other | None:
    if value is None or isinstance(value, OtherModel | ModelSpec):
        return value
    if not isinstance(value, str) or not value.strip():
        msg = f"job: {name}: expected none, same or a model's name, got {shown(value)}"
        raise SetupError(msg)
    members = {str(each.value): each for each in OtherModel}
    return members.get(value.lower(), value)


def _is_share(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < 1


def _dtype(value: object) -> DType | None:
    if value is None or isinstance(value, DType):
        return value
    known = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}
    if str(value) not in known:
        msg = f"job: frozen_dtype: {shown(value)} is not one of {', '.join(known)}"
        raise SetupError(msg)
    return known[str(value)]


def _check_count(value: object, name: str, *, least: int) -> None:
    if value is None and name not in _FROM_ZERO:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
        msg = f"job: {name}: expected a whole number from {least} up, got {shown(value)}"
        raise SetupError(msg)


def _pairs(text: str) -> dict[str, object]:
    """``kind:key=value,...``"""
    kind, colon, rest = text.partition(":")
    found: dict[str, object] = {"kind": kind.strip()}
    for pair in _split(rest) if colon else ():
        key, equals, value = pair.partition("=")
        if not equals:
            msg = f"job: {shown(pair)} is not KEY=VALUE, as in dpo:reference=precomputed"
            raise SetupError(msg)
        found[key.strip()] = _value(value.strip())
    return found


def _split(text: str) -> Iterable[str]:
    return (part for part in text.split(",") if part.strip())


def _value(text: str) -> object:
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _plain(value: object) -> str:
    if isinstance(value, ModelSpec):
        return value.name
    if isinstance(value, DType):
        return value.label
    return str(value.value if isinstance(value, Enum) else value)


PLAIN = Job()
"""Nothing but the model's own task."""
