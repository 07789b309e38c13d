"""The defaults of every training stack, and what is done with each key of its files."""

from memplan.sources.key_tables import Fate, key_table
from memplan.sources.stacks import STACKS
from memplan.sources.stacks.presets import Preset, load_preset, preset_names


def document() -> str:
    """All of it, as Markdown."""
    parts = [_section(load_preset(name)) for name in preset_names()]
    return "\n\n".join([*parts, "## Keys of their files", _keys()])


def _section(preset: Preset) -> str:
    lines = [f"## {preset.name}", "", f"{preset.source}.", ""]
    lines += ["| what it does | field | where it says so |", "| --- | --- | --- |"]
    for each in preset.defaults:
        source = f"{each.source}, " if each.source else ""
        lines.append(f"| `{each.said}` | `{each.field}` | {source}{each.where} |")
    return "\n".join(lines)


def _keys() -> str:
    """How many keys of each stack are read, change nothing, are left out or refused."""
    head = "| files of | read | change no memory | left out | upper bounds | refused |"
    lines = [head, "| --- " * 6 + "|"]
    for stack in STACKS:
        table = key_table(stack)
        more = " + training arguments" if table.arguments else ""
        fates = list(table.fates.values())
        cells = " | ".join(str(fates.count(fate)) for fate in Fate if fate is not Fate.SECTION)
        lines.append(f"| {table.source}{more} | {cells} |")
    return "\n".join(lines)
