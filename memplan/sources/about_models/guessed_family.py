"""The known family that a config of an unknown type is most like."""

from collections.abc import Mapping

from memplan.errors import did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.sources.about_models.found_config import FoundConfig

COMMON_FAMILIES = ("llama", "mistral", "qwen2", "mixtral", "gpt2", "bert", "roberta", "t5", "bart")
"""What an unknown model is likeliest to be built after."""
MAX_KEYS_NAMED = 8
"""Of a config's keys that a guess leaves unread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """The known family that a config of an unknown type is most like."""

    source: str
    model_type: str
    family: str
    unread: tuple[str, ...]
    """Keys with a number or a flag that this family does not read."""

    @property
    def refusal(self) -> str:
        """What to say when guessing is not allowed."""
        from memplan.families import supported_families

        known = supported_families()
        return (
            f"{self.source}: model_type {self.model_type!r} is not supported."
            f"{did_you_mean(self.model_type, known)} {len(known)} types are, such as "
            f"{', '.join(COMMON_FAMILIES)}. By its keys this is most like "
            f"{self.family}{self._unread}: take it as that with `family='{self.family}'`, "
            "or `allow_guess=True`"
        )

    @property
    def confession(self) -> str:
        """What to say beside every figure that rests on the guess."""
        return (
            f"A GUESS: model_type {self.model_type!r} is not supported and was read as {self.family}"
            f"{self._unread}"
        )

    @property
    def _unread(self) -> str:
        return f" (not read: {', '.join(self.unread)})" if self.unread else ""


def guess_family(found: FoundConfig) -> Guess:
    """Return the family that reads most of what was found, and what it leaves unread."""
    from memplan.sources.about_models.defaults import known_keys

    family = _nearest_family(found.config)
    known = known_keys(family)
    unread = [
        key
        for key, value in found.config.items()
        if key not in known and isinstance(value, int | float) and not key.endswith("token_id")
    ]
    return Guess(
        source=found.source,
        model_type=str(found.config.get("model_type")),
        family=family,
        unread=tuple(sorted(unread)[:MAX_KEYS_NAMED]),
    )


def _nearest_family(config: Mapping[str, object]) -> str:
    """Return the family that reads most of a config's keys; of equals, the commonest, then the one
    whose own keys the config leaves out least."""
    from memplan.families import supported_families
    from memplan.sources.about_models.defaults import known_keys

    def likeness(family: str) -> tuple[int, bool, int]:
        known = known_keys(family)
        return len(known & config.keys()), family in COMMON_FAMILIES, -len(known - config.keys())

    return max(supported_families(), key=likeness)
