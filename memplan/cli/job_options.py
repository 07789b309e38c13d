"""Options that say what is trained for, what is averaged, and how long sequences are."""

from memplan.cli.option_table import OptionGroup, SettingOption, Values

JOB_PANEL = "Job"


def job_of(settings: Values) -> object:
    """The job, its models looked up; None where none is given."""
    text = settings.get("job")
    if text is None:
        return None
    from memplan.sources.job_models import with_models
    from memplan.training.jobs import Job

    return with_models(Job.read(text))


def ema_of(settings: Values) -> object:
    """The average; None where none is asked for."""
    return settings.get("ema")


def lengths_of(settings: Values) -> object:
    """The lengths; None where one length holds for all."""
    text = settings.get("lengths")
    if text is None:
        return None
    from memplan.sources.lengths_file import read_lengths

    return read_lengths(text)


JOBS = (
    OptionGroup(
        field="job", make=job_of,
        options=(
            SettingOption(
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
            SettingOption(
                flag="--ema", field="ema", kind=str | None, metavar="DTYPE[@cpu]",
                panel=JOB_PANEL,
                help_text="An exponential average of the weights beside them: weights (as they "
                "are), fp32, bf16, with @cpu in CPU RAM.",
            ),
        ),
    ),
    OptionGroup(
        field="lengths", make=lengths_of,
        options=(
            SettingOption(
                flag="--lengths", field="lengths", kind=str | None, metavar="LENGTHS|FILE",
                panel=JOB_PANEL,
                help_text="Sequences of unequal lengths: 512:60%,4096:40% or p50=512,p95=2048,"
                "max=4096 or a file, with packed, or multiple=64 behind it.",
            ),
        ),
    ),
)  # fmt: skip
"""Options of what a job is."""
