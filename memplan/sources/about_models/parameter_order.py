"""In which order transformers' classes declare their parameters, by ``model_type``."""

from functools import cache

from memplan.sources.about_models.entry_file import EntryFile

_FILE = EntryFile(file_name="parameter_order.json", section="types", indent=2)


@cache
def declared_order(model_type: str) -> tuple[tuple[str, ...], ...]:
    """Return the order of a type's ``named_parameters()``; empty where it is not known.

    Each part is the name of a segment of the tape, then its modules, or single parameters where one
    module's do not stand together (``memplan.graph.declaration``).

    >>> declared_order("llava")[0]
    ('vision_tower.embed', 'embeddings', 'patch_embedding', 'position_embedding')
    """
    row = _FILE.entry(model_type)
    return tuple(tuple(part.split()) for part in row["order"]) if row else ()
