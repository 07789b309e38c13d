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
    ComponentKind.PARAMETERS: ("#1d384f", "#70c6ff"),
    ComponentKind.GRADIENTS: ("#7e5700", "#e8de8d"),
    ComponentKind.MASTER_WEIGHTS: ("#d62ff4", "#c40ed0"),
    ComponentKind.OPTIMIZER_STATES: ("#82946f", "#287d32"),
    ComponentKind.OTHER_MODELS: ("#121641", "#ca9b11"),
    ComponentKind.AVERAGED_WEIGHTS: ("#b51ab0", "#e050c1"),
    ComponentKind.ROLLOUT_ENGINE: ("#060109", "#3161ff"),
    ComponentKind.BUFFERS: ("#585858", "#a9a9a9"),
    ComponentKind.INPUTS: ("#3b2b15", "#fefefe"),
    ComponentKind.ACTIVATIONS: ("#e6630e", "#e50f0b"),
    ComponentKind.LOGITS_AND_LOSS: ("#8b0786", "#96568f"),
    ComponentKind.GATHERED_PARAMETERS: ("#4098aa", "#b1e3e4"),
    ComponentKind.COMMUNICATION_BUFFERS: ("#321ae5", "#7198ff"),
    ComponentKind.TEMPORARIES: ("#5f3f03", "#f0b722"),
    ComponentKind.KERNEL_SCRATCH: ("#866e72", "#a3827c"),
}
"""A component's colour on light and on dark, the same in every drawing and terminal.

Chosen so that any two are told apart with every kind of colour vision: by a search for the largest least
distance in OKLab, as seen and as seen without one kind of cones (Machado, Oliveira and Fernandes 2009,
table 1), under the contrasts above."""


_BY_LABEL = {kind.label: colours for kind, colours in COMPONENTS.items()}


def colour_of(name: str, *, scheme: int) -> str:
    """A colour by its name here, or by a component's, on light (0) or dark (1).

    >>> colour_of("back", scheme=0)
    '#ffffff'
    """
    return _BY_LABEL[name][scheme] if name in _BY_LABEL else (LIGHT, DARK)[scheme][name]


def variables(*, scheme: int) -> str:
    """The colours as properties of a style sheet, for light (0) or dark (1)."""
    named = (LIGHT, DARK)[scheme]
    parts = [f"--{name}:{colour}" for name, colour in named.items()]
    parts += [f"--{kind.label}:{colours[scheme]}" for kind, colours in COMPONENTS.items()]
    return ";".join(parts)
