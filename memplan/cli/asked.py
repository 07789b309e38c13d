"""What was typed, by the options' Python names."""

from typing import Any

from memplan.options.asked import Asked


def asked_of(ctx: Any) -> Asked:
    """Every option of the command that runs, and which of them were typed."""
    values, given = {}, set()
    for param in ctx.command.params:
        is_option = param.param_type_name == "option"
        name = param.opts[0].lstrip("-").replace("-", "_") if is_option else param.name
        values[name] = ctx.params[param.name]
        source = ctx.get_parameter_source(param.name)
        if source is not None and source.name == "COMMANDLINE":
            given.add(name)
    return Asked(values=values, given=frozenset(given))
