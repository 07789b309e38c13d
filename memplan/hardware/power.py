"""What a card may draw, by its data sheet [W]: for the energy of a run."""

from collections.abc import Mapping

from memplan.hardware.gpu import GpuSpec

BOARD_POWER_W: Mapping[str, int] = {
    "v100-sxm2": 300, "v100-pcie": 250, "v100s": 250, "t4": 70, "rtx2080ti": 250, "rtx8000": 260,
    "a100-pcie-40": 250, "a100-pcie-80": 300, "a100-sxm4": 400, "a800": 400, "a30": 165, "a10-": 150,
    "a10g": 150, "a40": 300, "rtx-a6000": 300, "rtx-a5000": 230, "rtx-a4000": 140, "rtx3090ti": 450,
    "rtx3090": 350, "rtx3080": 320, "rtx3060": 170, "l4-": 72, "l40": 300, "l40s": 350,
    "rtx4090": 450, "rtx4080": 320, "rtx4070ti": 285, "rtx6000ada": 300, "h100-pcie": 350,
    "h100-sxm": 700, "h800": 700, "h100-nvl": 400, "h200-sxm": 700, "h200-nvl": 600, "h20-": 400,
    "gh200": 700, "b200": 1000, "b300": 1100, "gb200": 1200, "gb300": 1400, "rtxpro6000": 600,
    "rtx5090": 575, "rtx5080": 360, "rtx5070ti": 300, "mi210": 300, "mi250x": 280, "mi250-": 280,
    "mi300x": 750, "mi300a": 760, "mi325x": 1000, "mi350x": 1000, "mi355x": 1400, "gaudi2": 600,
    "gaudi3": 900,
}  # fmt: skip
"""By the beginning of the catalog's name, the longest that fits; of half a board of MI250 half of it."""


def board_power(gpu: GpuSpec) -> int | None:
    """A card's limit of power [W]; None where it is not known.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> board_power(load_gpu("h100")), board_power(load_gpu("l40s"))
    (700, 350)
    """
    found = [name for name in BOARD_POWER_W if gpu.gpu_id.startswith(name)]
    return BOARD_POWER_W[max(found, key=len)] if found else None
