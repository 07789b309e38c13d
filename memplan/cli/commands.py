"""The commands, in the order that ``memplan --help`` lists them.

``memplan.cli.<name>`` holds the function ``<name>``. A module is imported when its command is
asked for, not to list it: a new command is one file and one line here.
"""

COMMANDS = {
    "estimate": "Estimate the memory of a training run, and say on which GPUs it fits.",
    "sweep": "Estimate a grid of setups on several GPUs, as a table, a matrix or rows for scripts.",
    "plan": "Search for the setups that fit, best first, and what would make the rest fit.",
    "explain": "Show the arithmetic of an estimate: every component, the step's timeline, a report.",
    "compare": "Set two setups side by side: what moved, verdicts, time, money; or published formulas.",
    "admit": "Say whether a job may start, and in which pool: for schedulers' hooks.",
    "verify": "Train a few real steps, or follow them on fake tensors: predicted beside measured.",
    "flops": "Count the FLOPs of a training step, by component and by others' formulas.",
    "models": "List the built-in models, or show where one model's parameters are.",
    "gpus": "List the GPU catalog, or show one GPU with its sources.",
    "mcp": "Serve agents: the commands as tools over the Model Context Protocol.",
    "doctor": "Look at this machine: cards and who uses them, memory, packages, and what fits here.",
}
"""Command name -> its line in the help: the first line of the function's docstring, as tested."""

ABOUT = "Will this training run fit, where do the bytes go, and what should change?"
TOP_OPTIONS = {
    "--version": "Show the version; with --verbose what a report needs.",
    "--verbose": "With --version: Python, system, dependencies, cache.",
    "--legend": "Explain every word of the answers.",
    "--install-completion [SHELL]": "Have this shell complete memplan: options, models, GPUs.",
    "--show-completion [SHELL]": "Show what that would add to the shell.",
}
"""What may be asked without a command, each with its value."""
MOST_COLUMNS = 100
"""Of a page of help."""

COMPLETION_VARIABLE = "_MEMPLAN_COMPLETE"
"""Set where a shell asks what may come next."""
