"""The transformer inside a diffusers pipeline, which a ``model_index.json`` lists with its other parts."""

from collections.abc import Mapping

from memplan.errors import ConfigError

TRANSFORMER = "transformer"
"""The folder of the part that is trained."""


def transformer_config(index: Mapping[str, object], *, source: str) -> str:
    """The path of the transformer's config in a pipeline's folder.

    Raises ``ConfigError`` where the pipeline has none, and names what it has in its place.

    >>> transformer_config({"transformer": ["diffusers", "FluxTransformer2DModel"]}, source="it")
    'transformer/config.json'
    """
    if _class_of(index.get(TRANSFORMER)):
        return f"{TRANSFORMER}/config.json"
    found = _class_of(index.get("unet")) or _class_of(index.get("prior"))
    what = f"its denoiser is a {found}" if found else "nothing in it takes noise away"
    name = index.get("_class_name", "this pipeline")
    msg = (
        f"{source}: {name} has no {TRANSFORMER}, {what}, which is not modelled; trace the module with "
        "memplan.trace"
    )
    raise ConfigError(msg)


def _class_of(part: object) -> str:
    """The class of a part, which is listed beside its library; empty where there is none."""
    return part[1] if isinstance(part, list) and len(part) == 2 and isinstance(part[1], str) else ""
