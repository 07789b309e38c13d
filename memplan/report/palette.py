"""Colours of drawings and of the report, one set for light screens and print, one for dark screens.

Text has a contrast of 4.5 with what it stands on, areas and lines one of 3 (WCAG 2.2, level AA, success
criteria 1.4.3 and 1.4.11); ``tests/report/test_palette.py`` computes both.
"""

from memplan.memory.account import ComponentKind

LIGHT = {
    "back": "#ffffff", "ink": "#1c1e21", "soft": "#5b6169", "edge": "#d9dce1", "panel": "#f5f6f8",
    "fits": "#bfe6c6", "tight": "#fbe3a1", "oom": "#f6b8b1", "states": "#bfe3ec",
    "long": "#3b6fb6", "medium": "#c8741d", "short": "#858a93", "added": "#8e5fc4",
    "red": "#b3261e",
}  # fmt: skip
"""By what they are for: page, text, quieter text, lines and boxes; verdicts behind text; lifetimes,
what lies beside the allocator, and the GPU's memory."""
DARK = {
    "back": "#15181c", "ink": "#e8eaed", "soft": "#a2a9b3", "edge": "#343a42", "panel": "#1e2329",
    "fits": "#1f5a2d", "tight": "#6b5110", "oom": "#7a2a23", "states": "#1d5361",
    "long": "#6f9fe0", "medium": "#f0a35c", "short": "#a7adb8", "added": "#b892ea",
    "red": "#ff8a80",
}  # fmt: skip
COMPONENTS = {
    ComponentKind.PARAMETERS: ("#4269d0", "#5b80e6"),
    ComponentKind.GRADIENTS: ("#a87900", "#efb118"),
    ComponentKind.MASTER_WEIGHTS: ("#7d5bbe", "#9474d4"),
    ComponentKind.OPTIMIZER_STATES: ("#2f8f43", "#3ca951"),
    ComponentKind.BUFFERS: ("#7f848d", "#9498a0"),
    ComponentKind.INPUTS: ("#8a8170", "#b9bcc2"),
    ComponentKind.ACTIVATIONS: ("#e0503a", "#ff725c"),
    ComponentKind.LOGITS_AND_LOSS: ("#d9448a", "#e05293"),
    ComponentKind.GATHERED_PARAMETERS: ("#238f89", "#38a7a0"),
    ComponentKind.COMMUNICATION_BUFFERS: ("#2b87c8", "#6cb8f0"),
    ComponentKind.TEMPORARIES: ("#a8764f", "#b98a63"),
    ComponentKind.KERNEL_SCRATCH: ("#6b6f76", "#868b93"),
}
"""A component's colour on light and on dark."""


def variables(*, scheme: int) -> str:
    """The colours as properties of a style sheet, for light (0) or dark (1)."""
    named = (LIGHT, DARK)[scheme]
    parts = [f"--{name}:{colour}" for name, colour in named.items()]
    parts += [f"--{kind.label}:{colours[scheme]}" for kind, colours in COMPONENTS.items()]
    return ";".join(parts)
