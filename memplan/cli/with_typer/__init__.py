"""The command as Typer has it: help, completion, and what is wrong with a command line."""
