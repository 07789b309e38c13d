"""Options that say what is trained for, what is averaged, and how long sequences are."""

from memplan.options.table import Option, OptionGroup, Values

JOB_PANEL = "Job"


def job_of(settings: Values) -> object:
    """The job, its models looked up; None where none is given."""
    text = settings.get("job")
    if text is None:
        return None
    from memplan.sources.job_models import with_models
    from memplan.training.jobs import Job

    return with_models(text if isinstance(text, Job) else Job.read(text))


def ema_of(settings: Values) -> object:
    """The average; None where none is asked for."""
    return settings.get("ema")


def evaluation_of(settings: Values) -> object:
    """The evaluation; None where none is asked for.

    Raises ``UsageError`` for details of one that has no batch size.
    """
    given = {name: settings.get(option) for name, option in _EVALUATION.items()}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if "batch_size" not in given:
        from memplan.errors import UsageError

        details = " and ".join(f"--{_EVALUATION[name].replace('_', '-')}" for name in given)
        msg = f"{details}: means nothing without --eval-batch-size: add that, or leave it out"
        raise UsageError(msg)
    from memplan.training.evaluation import Evaluation

    return Evaluation.read(given)


_EVALUATION = {
    "batch_size": "eval_batch_size",
    "batches_kept": "eval_batches_kept",
    "accumulation_steps": "eval_accumulation_steps",
    "seq_len": "eval_seq_len",
}
"""Options, by what of an evaluation they say."""


def lengths_of(settings: Values) -> object:
    """The lengths; None where one length holds for all."""
    text = settings.get("lengths")
    if not isinstance(text, str):
        return text
    from memplan.sources.lengths_file import read_lengths

    return read_lengths(text)


JOBS = (
    OptionGroup(
        field="job", make=job_of,
        options=(
            Option(
                flag="--job", field="job", kind=str | None, metavar="KIND[:KEY=VALUE,...]",
                panel=JOB_PANEL,
                help_text="What is trained for: sft, dpo, orpo, simpo, cpo, kto, reward, "
                "distillation, ppo or grpo, with its settings: dpo:reference=precomputed, "
                "grpo:rollout=vllm,gpu_memory_utilization=0.3. [default: sft]",
            ),
        ),
    ),
    OptionGroup(
        field="ema", make=ema_of,
        options=(
            Option(
                flag="--ema", field="ema", kind=str | None, metavar="DTYPE[@cpu]",
                panel=JOB_PANEL,
                help_text="An exponential average of the weights beside them: weights (as they "
                "are), fp32, bf16, with @cpu in CPU RAM.",
            ),
        ),
    ),
    OptionGroup(
        field="evaluation", make=evaluation_of,
        options=(
            Option(
                flag="--eval-batch-size", field="evaluation", kind=int | None, metavar="N",
                panel=JOB_PANEL,
                help_text="Evaluate between steps, in batches of so many sequences: a phase of its "
                "own, which the verdict looks at too.",
            ),
            Option(
                flag="--eval-batches-kept", field="evaluation", kind=int | None, metavar="N",
                panel=JOB_PANEL,
                help_text="Batches whose logits stay on the GPU, for metrics. [default: 0, the loss "
                "alone]",
            ),
            Option(
                flag="--eval-accumulation-steps", field="evaluation", kind=int | None,
                metavar="N", panel=JOB_PANEL,
                help_text="Batches after which they go to the CPU. [default: when all are through]",
            ),
            Option(
                flag="--eval-seq-len", field="evaluation", kind=int | None, metavar="N",
                panel=JOB_PANEL,
                help_text="Tokens of a sequence of evaluation. [default: a step's]",
            ),
        ),
    ),
    OptionGroup(
        field="lengths", make=lengths_of,
        options=(
            Option(
                flag="--lengths", field="lengths", kind=str | None, metavar="LENGTHS|FILE",
                panel=JOB_PANEL,
                help_text="Sequences of unequal lengths: 512:60%,4096:40% or p50=512,p95=2048,"
                "max=4096 or a file, with packed, or multiple=64 behind it.",
            ),
        ),
    ),
)  # fmt: skip
"""Options of what a job is."""
