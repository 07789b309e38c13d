"""The built-in models: sizes of well-known models, looked up by name or by hub id.

``data/models.json`` holds one entry a line: the hub id, other names, where sizes were read if not at the hub id (``source``), the family (transformers'
``model_type``), the class that the checkpoint was published as, the number format of its weights,
and those sizes that differ from the defaults of the family's config class, under the names of
Hugging Face's configs, nested ones too. ``tie_word_embeddings`` is false where the published
checkpoint holds two matrices although transformers ties them (T5 v1.1, flan-T5, ByT5, mT5,
Mistral Small 3.1 and 3.2). No index of the names is kept: a name is looked for in the file's bytes.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from memplan.errors import nearest
from memplan.fast_dataclass import dataclass
from memplan.sources.about_models.entry_file import EntryFile

_FILE = EntryFile(file_name="models.json", section="models", indent=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinModel:
    """One entry of the registry."""

    name: str
    """What people type, in lower case."""
    hub_id: str
    """Repository of the published checkpoint on the Hugging Face hub."""
    aliases: tuple[str, ...]
    """Other names and hub ids of models of exactly this shape."""
    family: str
    """transformers' ``model_type``."""
    architecture: str
    """transformers' class of the published checkpoint."""
    dtype: str
    """Number format of the published weights, by torch's name."""
    sizes: Mapping[str, object]
    """Keys of the config that differ from the defaults of the family's config class."""

    def to_dict(self) -> dict[str, object]:
        """One row of ``memplan models --format json``."""
        return {
            "name": self.name,
            "family": self.family,
            "hub_id": self.hub_id,
            "aliases": self.aliases,
        }

    def config(self) -> dict[str, object]:
        """Return a config of the form of ``config.json``, less what its class fills in."""
        return {
            "model_type": self.family,
            "architectures": [self.architecture],
            "dtype": self.dtype,
            **self.sizes,
        }


def builtin_names() -> tuple[str, ...]:
    """Return the names of all built-in models, family by family.

    >>> "t5-3b" in builtin_names()
    True
    """
    return tuple(_FILE.entries())


def builtin_models() -> tuple[BuiltinModel, ...]:
    """All built-in models, family by family.

    >>> len(builtin_models()) == len(builtin_names())
    True
    """
    return tuple(_to_model(name, entry) for name, entry in _FILE.entries().items())


def find_builtin(name: str) -> BuiltinModel | None:
    """Return the built-in model with this name, alias or hub id; upper and lower case are the same.

    >>> find_builtin("google-t5/T5-3B").name
    't5-3b'
    """
    key = name.strip().lower()
    entry = _FILE.entry(key)
    if entry is not None:
        return _to_model(key, entry)
    for own_name, holder in _FILE.entries_holding(key):
        if key in map(str.lower, _other_names(holder)):
            return _to_model(own_name, holder)
    return None


def builtins_holding(text: str) -> list[BuiltinModel]:
    """The built-in models whose name, other names or family hold a text; upper and lower case are
    the same.

    >>> [model.name for model in builtins_holding("T5-V1_1-X")]
    ['t5-v1.1-xl', 't5-v1.1-xxl']
    """
    part = text.strip().lower()
    return [
        _to_model(name, entry)
        for name, entry in _FILE.entries().items()
        if any(part in each.lower() for each in (name, entry["family"], *_other_names(entry)))
    ]


def builtin_config(name: str) -> tuple[str, dict[str, object]] | None:
    """Return a built-in model's own name and its config, or None where there is no such model.

    >>> builtin_config("gpt2-medium")[1]["n_layer"]
    24
    """
    model = find_builtin(name)
    return (model.name, model.config()) if model else None


_MOST_SUGGESTED = 3


def nearest_builtins(name: str) -> tuple[str, ...]:
    """Return the built-in names that begin with ``name``, at most three, else the one most like it.

    ``name`` may be a hub id; empty when nothing comes close.

    >>> nearest_builtins("lama-3.1-8b"), nearest_builtins("t5")
    (('llama-3.1-8b',), ('t5-small', 't5-base', 't5-large'))
    """
    last_part = name.strip().lower().rpartition("/")[2]
    begun = [known for known in builtin_names() if last_part and known.startswith(last_part)]
    if begun:
        return tuple(begun[:_MOST_SUGGESTED])
    guess = nearest(last_part, (*builtin_names(), *_aliases()))
    return (_aliases().get(guess, guess),) if guess else ()


@cache
def _aliases() -> dict[str, str]:
    """Return the built-in name for every hub id and alias, in lower case."""
    return {
        alias.lower(): name
        for name, entry in _FILE.entries().items()
        for alias in _other_names(entry)
    }


def _other_names(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (entry["hub_id"], *entry.get("aliases", ()))


def _to_model(name: str, entry: Mapping[str, Any]) -> BuiltinModel:
    return BuiltinModel(
        name=name,
        hub_id=entry["hub_id"],
        aliases=tuple(entry.get("aliases", ())),
        family=entry["family"],
        architecture=entry["architecture"],
        dtype=entry["dtype"],
        sizes=dict(entry["sizes"]),
    )
