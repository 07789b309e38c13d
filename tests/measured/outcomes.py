"""What memplan says of a published record, and what the whole of them comes to."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from memplan.errors import MemplanError
from memplan.estimator import Estimate, Verdict, estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.sources.setup_file import setup_from_mapping
from memplan.training.setup import TrainingSetup
from tests.measured.runs import NotExpressibleError, Record, Run, UnstatedError, is_model_parallel
from tests.measured.stacks import translate


@dataclass(frozen=True, eq=False)
class Answered:
    """An estimate, its verdict, and what its replay reserved: of one run there are several records."""

    answer: Estimate

    @cached_property
    def verdict(self) -> Verdict | None:
        return self.answer.verdict

    @cached_property
    def reserved_bytes(self) -> int:
        return self.answer.reserved_bytes


@cache
def _answered(model: str, task: str | None, setup: TrainingSetup, gpu: str) -> Answered:
    """The estimate of a run, made once for all collections; the model is its name or file as JSON."""
    return Answered(estimate(load_model(json.loads(model), task), setup, load_gpu(gpu)))


def _asked(answered: Answered, record: Record) -> None:
    """Ask all that will be: the run is at hand now, and would have to be played again later."""
    assert answered.verdict is not None
    assert record["what"] == "max_allocated" or answered.reserved_bytes


@dataclass(frozen=True)
class Outcome:
    """One record: the estimate of the run that it describes, or what stands against one."""

    record: Record
    run: Run | None = None
    answered: Answered | None = None
    blocked_by: str = ""
    """The feature that memplan LackingError, or what it says against the setup."""
    unstated: bool = False
    """The source does not say enough for anybody."""

    @property
    def answer(self) -> Estimate | None:
        """The estimate of its run."""
        return None if self.answered is None else self.answered.answer

    @property
    def is_expressible(self) -> bool:
        """Whether the run is a ``TrainingSetup``."""
        return self.answer is not None

    @property
    def measured_bytes(self) -> int:
        """The measured figure, without what the source says lies beside torch's memory [bytes]."""
        assert self.run is not None
        return int(self.record["measured_bytes"]) - self.run.beside_bytes

    @property
    def predicted_bytes(self) -> int:
        """What the record's counter would show: allocated, or reserved by the replay [bytes]."""
        assert self.answered is not None
        is_allocated = self.record["what"] == "max_allocated"
        return self.answered.answer.peak_bytes if is_allocated else self.answered.reserved_bytes

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def outcome_of(record: Record) -> Outcome:
    """Translate a record and estimate its run; a refusal is an outcome, anything else raised a bug."""
    try:
        run = translate(record)
        setup = setup_from_mapping(run.setup, source=record["id"])
        answered = _answered(json.dumps(run.model), run.task, setup, run.gpu)
        _asked(answered, record)
    except NotExpressibleError as error:
        return Outcome(record, blocked_by=error.feature, unstated=isinstance(error, UnstatedError))
    except MemplanError as error:
        return Outcome(
            record, blocked_by=f"memplan: {str(error).removeprefix(record['id'] + ': ')}"
        )
    return Outcome(record, run=run, answered=answered)


def is_in_scope(record: Record) -> bool:
    """Whether a run is one GPU's, or data-parallel: plain, FSDP or ZeRO."""
    source = record["source_url_or_repo_path"]
    is_megatron = any(each in source for each in ("Megatron", "SimuMax"))
    return not is_model_parallel(record) and not is_megatron


@dataclass(frozen=True)
class Summary:
    """The figures of a set of outcomes."""

    outcomes: tuple[Outcome, ...]

    def of(self, *counters: str) -> "Summary":
        """Those whose record counts this."""
        return Summary(tuple(each for each in self.outcomes if each.record["what"] in counters))

    @property
    def expressible(self) -> tuple[Outcome, ...]:
        """The outcomes with an estimate."""
        return tuple(each for each in self.outcomes if each.is_expressible)

    @property
    def share_expressible(self) -> float:
        """Expressible records over all."""
        return len(self.expressible) / len(self.outcomes)

    @property
    def share_of_stated(self) -> float:
        """Expressible records over those whose sources say enough."""
        stated = [each for each in self.outcomes if not each.unstated]
        return len(self.expressible) / len(stated)

    def quantile(self, share: float) -> float:
        """The absolute error that this share of the expressible records does not exceed."""
        errors = sorted(abs(each.error) for each in self.expressible)
        return errors[min(len(errors) - 1, int(share * len(errors)))]

    @property
    def blocks(self) -> Counter[str]:
        """Which feature stands against how many records."""
        return Counter(each.blocked_by for each in self.outcomes if not each.is_expressible)


def summary_of(records: Iterable[Record]) -> Summary:
    """The outcomes of those records that are in scope."""
    return Summary(tuple(outcome_of(each) for each in records if is_in_scope(each)))


def words_of(model: str, setup: TrainingSetup) -> str:
    """A run in a few words: model, GPUs, engine, batch, checkpointing, adapter."""
    parts = [
        model,
        f"{setup.num_gpus} x {setup.chosen_engine.value}"
        + (f" {setup.zero_stage}" if setup.zero_stage else ""),
        f"{setup.micro_batch_size} x {setup.seq_len}",
        f"ckpt {getattr(setup.checkpointing, 'value', setup.checkpointing)}",
    ]
    if setup.adapter is not None:
        parts.append(type(setup.adapter).__name__)
    return ", ".join(parts)
