"""A command line as it was typed, in the command's own words: values that may be left out, names from elsewhere."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def _is_any(word: str) -> bool:
    return bool(word)


def _is_size(word: str) -> bool:
    return word == "max" or (word != "" and not word.strip("0123456789.,-"))


OPTIONAL_VALUES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "--check": ("all", ("all", "any").__contains__),
    "--lora": ("16", _is_size),
    "--pivot": ("peak", _is_any),
    "--install-completion": ("this", _is_any),
    "--show-completion": ("this", _is_any),
}
"""Options that may stand alone: what they then mean, and which words behind them are theirs all the same.

An adapter of rank 16 is what TRL trains where nobody names one (trl/trainer/model_config.py, ``lora_r``).
"""


def own_command_line(params: Sequence[Any], args: Sequence[str]) -> list[str]:
    """What was typed, in words that the command's parameters know."""
    options = [each for each in params if each.param_type_name == "option"]
    known = {
        name: not each.is_flag for each in options for name in (*each.opts, *each.secondary_opts)
    }
    return list(_own(list(args), known | {"--help": False}))


def _own(left: list[str], known: Mapping[str, bool]) -> Iterator[str]:
    """Word by word; ``known``: whether a value follows an option.

    >>> known = {"--checkpointing": True, "--seq-len": True, "--quantize": True, "--lora": True}
    >>> list(_own(["gpt2", "--max_length", "512", "--gradient-checkpointing", "true"], known))
    ['gpt2', '--seq-len', '512', '--checkpointing', 'full']
    >>> list(_own(["--qlora", "--seq-len=64"], known))
    ['--quantize', 'nf4', '--lora', '16', '--seq-len=64']
    """
    while left:
        word = left.pop(0)
        if word == "--":
            yield from (word, *left)
            return
        name, equals, value = word.partition("=")
        if word.startswith("--") and name not in known:
            *before, word = _in_own_names(name, equals, value, left, known) or [""]
            yield from before
        if word:
            yield word
        if known.get(word):
            yield from _value(word, left)


def _value(option: str, left: list[str]) -> Iterator[str]:
    """What stands behind an option that takes a value, or what it means alone."""
    usual, is_its_own = OPTIONAL_VALUES.get(option, ("", _is_any))
    following = left[0] if left else ""
    if usual and (following.startswith("-") or not is_its_own(following)):
        yield usual
    elif left:
        yield left.pop(0)


def _in_own_names(
    name: str, equals: str, value: str, left: list[str], known: Mapping[str, bool]
) -> list[str]:
    """An option that the command does not have, as it calls it; as it stands where nothing is known of it."""
    from memplan.options.other_names import is_word_of, own_words, with_word  # most are known

    own = own_words(name, known)
    if not own:
        return [f"{name}{equals}{value}"]
    if own[-1] in known:
        return [*own[:-1], f"{own[-1]}{equals}{value}"]
    says = value if equals else left[0] if left else ""
    if not equals and is_word_of(own, says):
        left.pop(0)
    return with_word(own, says)
