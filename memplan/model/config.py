"""Reading a config's keys: typed, with the class's defaults and names, and errors that say where.

A ``ConfigReader`` holds one config dict and what its transformers class would fill in. It answers
for a key by the name a family asks for, the name the class uses for it (GPT-2's ``n_embd`` for
``hidden_size``) or the other way round, and refuses values that cannot be sizes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from memplan.errors import ConfigError
from memplan.fast_dataclass import dataclass
from memplan.model.read_log import DefaultRead, ReadLog

MAX_SIZE = 2**40
"""No dimension of a model is larger: what exceeds it is a slip of the keyboard."""
MAX_LAYERS = 1_000
"""Layers that are laid out in a moment: an account follows each one. DeepNet (arXiv:2203.00555), the
deepest transformer that was trained, has as many."""


class ConfigReader:
    """One config, read key by key."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        source: str,
        model_type: str = "",
        defaults: Mapping[str, object] | None = None,
        renamed: Mapping[str, str] | None = None,
        path: str = "",
        absent_part: str = "",
        log: ReadLog | None = None,
        all_defaults: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.config = config
        self.source = source
        """File, hub id or built-in name, for messages."""
        self.defaults = defaults or {}
        self.renamed = renamed or {}
        """What the class calls a key, by its common name."""
        self._overwritten = {
            own: name
            for name, own in self.renamed.items()
            if name != own and name in self.defaults and own in self.defaults
        }
        """Common names that are fields of the class too, which sets its own name behind them (Step 3.5's)."""
        self._renamed = tuple(
            (name, own) for name, own in self.renamed.items() if self._overwritten.get(own) != name
        )
        self.path = path
        self.model_type = model_type
        """Whose class the defaults and names are."""
        self.absent_part = absent_part
        """The key of this nested config where the outer one leaves it out as a whole."""
        self.log = ReadLog() if log is None else log
        self.all_defaults = {} if all_defaults is None else all_defaults  # long to count
        """Of every type's class, for nested configs."""
        self._part = self.log.part(path, config, model_type, absent_part)

    def nested(
        self,
        config: Mapping[str, object],
        path: str,
        *,
        model_type: str = "",
        defaults: Mapping[str, object] | None = None,
        renamed: Mapping[str, str] | None = None,
        absent_part: str = "",
    ) -> "ConfigReader":
        """A reader of a config inside this one, or of another form of this one."""
        return ConfigReader(
            config,
            source=self.source,
            model_type=model_type,
            defaults=defaults,
            renamed=renamed,
            path=path,
            absent_part=absent_part,
            log=self.log,
            all_defaults=self.all_defaults,
        )

    def fail(self, key: str, problem: str) -> ConfigError:
        """Make the error for a key."""
        return ConfigError(f"{self.source}: {self.path}{key}: {problem}")

    def raw(self, *keys: str) -> object:
        """The first value present under any of the keys, else the class's default, else None."""
        return self._look_up(keys, is_size=_is_size)

    def _look_up(self, keys: tuple[str, ...], *, is_size: Callable[[object], bool]) -> object:
        asked = self._ask(*keys)
        for name in asked.names:
            found = self.config.get(name)
            if found is not None:
                self._note_overruled(name, found)
                return found
        for name in asked.own_first:
            value = self.defaults.get(name)
            if value is not None and name not in self.config:
                if is_size(value):
                    self._note_default(name, value)
                return value
        return None

    def _ask(self, *keys: str) -> "_Asked":
        """All names of what is asked for, which are known from here on."""
        asked = _asked(keys, self._renamed)
        self._part.spellings.update(asked.same)
        return asked

    def _note_overruled(self, name: str, value: object) -> None:
        """Note that another name for a key is there too, and says something else."""
        own = self._overwritten.get(name, self.renamed.get(name))
        if own is not None and self.config.get(own, value) not in (value, None):
            self.log.overruled[f"{self.path}{own}"] = f"{self.path}{name}"

    def _note_default(self, name: str, value: object) -> None:
        self.log.add_default(
            DefaultRead(
                path=self.path,
                key=name,
                value=value,
                model_type=self.model_type,
                absent_part=self.absent_part,
            )
        )

    def _note_decided(self, key: str, value: object) -> None:
        """Note what a class decides without a number in its defaults, where that makes another model."""
        if key == "num_key_value_heads" or (key == TYING and self.model_type in TIED_OR_NOT):
            self._note_default(key, value)

    def has(self, key: str) -> bool:
        """Whether the config itself (not the class) gives the key a value."""
        return any(self.config.get(name) is not None for name in self._ask(key).names)

    def optional_integer(self, *keys: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int | None:
        """A whole number, or None where neither config nor class gives one."""
        value = self.raw(*keys)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_SIZE:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(keys[0], f"expected a whole number, got {_shown(value)}")
        if not minimum <= value <= maximum:
            raise self.fail(keys[0], f"must be from {minimum} to {maximum}, got {_shown(value)}")
        return value

    def integer(
        self,
        *keys: str,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = MAX_SIZE,
    ) -> int:
        """A whole number; an error where there is none and no default."""
        value = self.optional_integer(*keys, minimum=minimum, maximum=maximum)
        if value is not None:
            return value
        if default is None:
            raise self.fail(keys[0], "is missing and the model's class has no default for it")
        self._note_decided(keys[0], default)
        return default

    def layers(self, *keys: str, default: int | None = None) -> int:
        """A number of layers."""
        return self.integer(*keys, default=default, minimum=1, maximum=MAX_LAYERS)

    def number(
        self, *keys: str, default: float = 0.0, minimum: float = 0.0, maximum: float = 1.0
    ) -> float:
        """A real number, by default a probability."""
        # A share of something, such as a dropout, is no size; a ratio that may exceed 1 is one.
        value = self._look_up(keys, is_size=lambda value: maximum > 1 and value != 0)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(keys[0], f"expected a number, got {_shown(value)}")
        if not minimum <= value <= maximum:
            raise self.fail(keys[0], f"must be from {minimum} to {maximum}, got {_shown(value)}")
        return float(value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        """A true-or-false value."""
        value = self.raw(*keys)
        if keys[0] == TYING and not self.has(TYING):
            self._note_decided(keys[0], default if value is None else value)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        raise self.fail(keys[0], f"expected true or false, got {_shown(value)}")

    def text(self, *keys: str, default: str = "") -> str:
        """A string."""
        value = self.raw(*keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(keys[0], f"expected a string, got {_shown(value)}")
        return value

    def sequence(self, *keys: str) -> list[object]:
        """A list; empty where there is none."""
        value = self.raw(*keys)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fail(keys[0], f"expected a list, got {_shown(value)}")
        return value

    def integers(self, *keys: str, minimum: int = 0) -> list[int]:
        """A list of whole numbers."""
        values = self.sequence(*keys)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.fail(keys[0], f"expected whole numbers, got {_shown(value)}")
            if not minimum <= value <= MAX_SIZE:
                raise self.fail(keys[0], f"must be {minimum} or more, got {_shown(value)}")
        return [value for value in values if isinstance(value, int)]

    def texts(self, *keys: str) -> list[str]:
        """A list of strings."""
        values = self.sequence(*keys)
        for value in values:
            if not isinstance(value, str):
                raise self.fail(keys[0], f"expected strings, got {_shown(value)}")
        return [value for value in values if isinstance(value, str)]

    def mapping(self, *keys: str) -> Mapping[str, object] | None:
        """A nested object, or None."""
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(keys[0], f"expected an object, got {_shown(value)}")
        return value

    def child(self, key: str, model_type: str) -> "ConfigReader":
        """A reader of a nested config; an empty one where there is none.

        Its class is that of its own ``model_type``, or of the one given where it names none that
        is known.
        """
        found = self.mapping(key)
        nested: Mapping[str, object] = {} if found is None else found
        own = nested.get("model_type")
        if isinstance(own, str) and own in self.all_defaults:
            model_type = own
        row = self.all_defaults.get(model_type, {})
        defaults, renamed = row.get("defaults"), row.get("renamed")
        return self.nested(
            nested,
            self.path if found is None else f"{self.path}{key}.",
            model_type=model_type,
            defaults=defaults if isinstance(defaults, Mapping) else {},
            renamed=renamed if isinstance(renamed, Mapping) else {},
            absent_part=key if found is None else "",
        )

    def choice(self, key: str, value: str, known: Mapping[str, object] | Iterable[str]) -> str:
        """Check that a string is one of those known."""
        options = list(known)
        if value not in options:
            raise self.fail(key, f"{value!r} is not known; known are {', '.join(sorted(options))}")
        return value

    def divide(self, key: str, value: int, by_key: str, divisor: int) -> int:
        """A quotient that must come out whole."""
        if value % divisor:
            raise self.fail(key, f"{value} is not divisible by {by_key} ({divisor})")
        return value // divisor


@dataclass(frozen=True, slots=True)
class _Asked:
    """The names of what is asked for."""

    names: tuple[str, ...]
    """The common one is set last, and so decides (``attribute_map``)."""
    own_first: tuple[str, ...]
    """The same, those of the class's own before the common ones: as its defaults are named."""
    same: Mapping[str, frozenset[str]]
    """For each, all of them."""


@lru_cache(maxsize=4096)
def _asked(keys: tuple[str, ...], renamed: tuple[tuple[str, str], ...]) -> _Asked:
    """Found once for all configs of a class: a reader asks for fifty keys, and reads a config anew for each default."""
    own = dict(renamed)
    names = []
    for key in keys:
        names += [name for name, other in renamed if other == key]
        names += [key, own[key]] if own.get(key) else [key]
    same = frozenset(names)
    own_first = sorted(names, key=own.__contains__)
    return _Asked(tuple(names), tuple(own_first), dict.fromkeys(names, same))


TYING = "tie_word_embeddings"

TIED_OR_NOT = frozenset({
    "bitnet", "diffllama", "doge", "ernie4_5_moe", "falcon", "falcon_mamba", "fsmt", "granite",
    "granitemoe", "granitemoehybrid", "hunyuan_v1_dense", "kimi_k25", "llama", "longt5",
    "minicpmv4_6", "ministral3", "mistral3", "mt5", "nemotron_h", "olmo", "paddleocr_vl", "phi3",
    "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3",
    "qwen3_5_text", "qwen3_vl", "qwen3_vl_text", "starcoder2", "t5", "vilt",
})  # fmt: skip
"""Types of which some published models tie the output matrix and some, or the class, do not.

With all others the class says what every model does, so a config that leaves the key out says
nothing less.
"""


def _is_size(value: object) -> bool:
    """Whether this is a whole number, or a list with one."""
    if isinstance(value, list):
        return any(_is_size(each) for each in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
