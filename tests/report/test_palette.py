"""Contrast of the report's colours, computed as WCAG 2.2 defines it."""

import math
import re

import pytest

import memplan
from memplan.memory.account import ComponentKind
from memplan.report.pages.frame import STYLE
from memplan.report.pages.palette import COMPONENTS, DARK, LIGHT

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
    picture = memplan.estimate("gpt2", seq_len=128, gpu="t4").plot("step")
    style = STYLE.template + picture.svg
    known = {colour.lower() for palette in (LIGHT, DARK) for colour in palette.values()}
    known |= {colour for colours in COMPONENTS.values() for colour in colours}
    assert {colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{3,8}\b", style)} <= known


def test_quiet_text_never_stands_on_a_verdict() -> None:
    for rule in re.findall(r"[^{}]+\{[^{}]*\}", STYLE.template):
        assert not ("var(--soft)" in rule and re.search(r"var\(--(fits|tight|oom|states)", rule))


# -- colour vision -----------------------------------------------------------------------------------

MISSING_CONES = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip
"""What is seen without one kind of cones, of linear red, green and blue (Machado, Oliveira and Fernandes
2009, table 1, severity 1)."""
TOLD_APART = 0.06
"""Distance in OKLab: three times what is just noticed of areas that touch (0.02)."""
TOUCHING = 0.09
"""Of components that lie next to each other in a stack, or next but one."""


def linear(colour: str) -> tuple[float, ...]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )


def oklab(colour: tuple[float, ...]) -> tuple[float, ...]:
    """Ottosson's space, in which distances are as they are seen."""
    red, green, blue = colour
    cones = (
        0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue,
        0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue,
        0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue,
    )
    long, medium, short = (each ** (1 / 3) for each in cones)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def seen(colour: str, vision: str) -> tuple[float, ...]:
    parts = linear(colour)
    if vision in MISSING_CONES:
        rows = MISSING_CONES[vision]
        parts = tuple(
            min(1.0, max(0.0, sum(weight * part for weight, part in zip(row, parts, strict=True))))
            for row in rows
        )
    return oklab(parts)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", ["all cones", *MISSING_CONES])
def test_components_are_told_apart_with_every_colour_vision(scheme: int, vision: str) -> None:
    kinds = list(ComponentKind)
    places = [seen(COMPONENTS[kind][scheme], vision) for kind in kinds]
    for one, first in enumerate(places):
        for other in range(one + 1, len(places)):
            least = TOUCHING if other - one <= 2 else TOLD_APART
            assert math.dist(first, places[other]) >= least, (kinds[one], kinds[other])


def test_the_old_colours_were_not() -> None:
    """Blue and violet of parameters and master weights, which differ in red alone."""
    one, other = (seen(colour, "deuteranopia") for colour in ("#4269d0", "#7d5bbe"))
    assert math.dist(one, other) < TOLD_APART
