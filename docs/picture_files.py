"""A PNG of each kind of picture, for whoever reads the docs where SVG is not drawn (``make pictures``).

matplotlib draws them from the same shapes (``Picture.to_figure``); the site shows the drawings themselves.
"""

from pathlib import Path

from site_hooks import PICTURES

FOLDER = Path(__file__).parent / "pictures"


def main() -> None:
    """Write every one anew."""
    FOLDER.mkdir(exist_ok=True)
    for name, made in PICTURES.items():
        figure = made().to_figure()
        figure.savefig(FOLDER / f"{name}.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
