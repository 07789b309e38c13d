"""Contrast of the report's colours, computed as WCAG 2.2 defines it."""

import re

import pytest

from memplan.report.html import STYLE
from memplan.report.palette import COMPONENTS, DARK, LIGHT
from memplan.report.svg import STYLE as DRAWING

TEXT, AREA = 4.5, 3.0
"""Level AA: text, and what is no text."""
SCHEMES = [pytest.param(0, LIGHT, id="light"), pytest.param(1, DARK, id="dark")]


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize(("scheme", "palette"), SCHEMES)
@pytest.mark.parametrize("ground", ["back", "panel"])
def test_text_can_be_read(scheme: int, palette: dict[str, str], ground: str) -> None:
    del scheme
    for name in ("ink", "soft", "red"):
        assert contrast(palette[name], palette[ground]) >= TEXT, name


@pytest.mark.parametrize(("scheme", "palette"), SCHEMES)
@pytest.mark.parametrize("verdict", ["fits", "tight", "oom", "states"])
def test_a_verdict_can_be_read(scheme: int, palette: dict[str, str], verdict: str) -> None:
    del scheme
    assert contrast(palette["ink"], palette[verdict]) >= TEXT


@pytest.mark.parametrize(("scheme", "palette"), SCHEMES)
def test_drawings_can_be_seen(scheme: int, palette: dict[str, str]) -> None:
    for name in ("long", "medium", "short", "added", "ink", "red"):
        assert contrast(palette[name], palette["back"]) >= AREA, name
    for kind, colours in COMPONENTS.items():
        assert contrast(colours[scheme], palette["panel"]) >= AREA, kind


def test_there_are_no_other_colours() -> None:
    # Half-transparent grid lines are decoration: what they mark is written beside them.
    style = STYLE.template + DRAWING.replace("#8884", "")
    known = {colour.lower() for palette in (LIGHT, DARK) for colour in palette.values()}
    assert {colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{3,8}\b", style)} <= known


def test_quiet_text_never_stands_on_a_verdict() -> None:
    for rule in re.findall(r"[^{}]+\{[^{}]*\}", STYLE.template):
        assert not ("var(--soft)" in rule and re.search(r"var\(--(fits|tight|oom|states)", rule))
