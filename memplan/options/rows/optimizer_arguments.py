"""The optimizer's own settings, written as ``TrainingArguments.optim_args`` is."""

from memplan.options.table import Option, OptionGroup, Values


def optimizer_options_of(values: Values) -> "dict[str, object] | None":
    """The settings of ``--optim-args``; None where it is not given.

    Raises ``UsageError`` for text that is no list of settings.
    """
    text = values.get("optim_args")
    if text is None or not isinstance(text, str):
        return text
    from memplan.errors import UsageError
    from memplan.training.optimizers.arguments import parse_arguments

    try:
        return parse_arguments(text)
    except ValueError as error:
        msg = f"--optim-args: {error}"
        raise UsageError(msg) from None


_ARGUMENTS = Option(
    flag="--optim-args", field="optimizer_options", kind=str | None, metavar="KEY=VALUE,...",
    help_text="The optimizer's own settings: rank=64,target_modules=attn+mlp.",
)  # fmt: skip
OPTIMIZER_ARGUMENTS = OptionGroup(
    field="optimizer_options", options=(_ARGUMENTS,), make=optimizer_options_of
)
