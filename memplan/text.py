"""Text that other people wrote, made fit to be shown: names, keys and values out of files.

A terminal obeys what it is sent, and a name may hold anything: an escape sequence that clears the
screen, a mark that turns the line round, half a character out of a file's name, a megabyte.
"""

MAX_SHOWN = 60
"""Characters of a value that a message repeats."""
MAX_MESSAGE = 600
"""Characters of a whole message; what is longer loses its middle."""
_CUT = " ... "

_UNPRINTABLE = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and newline
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the direction of the text
    r"\u2028\u2029\ud800-\udfff]"  # other line ends, halves of a character
)


def printable(text: str) -> str:
    r"""The text with what a terminal would obey written out; newlines and tabs stay.

    >>> printable("t5\x1b[2J")
    't5\\x1b[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    import re  # most texts get no further

    return re.sub(_UNPRINTABLE, lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""The printable text without line ends or runs of blanks.

    >>> one_line("my\n model")
    'my model'
    """
    return printable(" ".join(text.split()))


def in_markdown(text: str) -> str:
    """Text in one line that Markdown, and the HTML that is allowed in it, take for no markup.

    >>> in_markdown("a | b <= *c*")
    'a \\\\| b &lt;= \\\\*c\\\\*'
    """
    import re

    found = one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(_MARKUP, r"\\\g<0>", found)


_MARKUP = r"[\\|*`\[\]]|(?<![^\W_])_|_(?![^\W_])"
"""Signs of Markdown; an underscore inside a word is none."""


def shortened(text: str, limit: int = MAX_MESSAGE) -> str:
    """The text, or its two ends where it is longer: where something is, and what to do, stay.

    >>> shortened("0123456789" * 3, 20)
    '0123456789 ... 56789'
    """
    if len(text) <= limit:
        return text
    kept = limit - len(_CUT)
    tail = kept // 3
    return f"{text[: kept - tail]}{_CUT}{text[-tail:]}"


def shown(value: object) -> str:
    """A value as a message repeats it: text in quotes, shortened; a list or mapping by its kind.

    >>> shown("bf17"), shown([1, 2]), shown(10**400)
    ("'bf17'", 'a list', 'a number of 401 digits')
    """
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}...")
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_SHOWN:
        return f"a number of {_num_digits(value)} digits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _num_digits(number: int) -> int:
    """Digits of a number that Python may refuse to print."""
    digits: int = abs(number).bit_length() * 30103 // 100_000
    return digits + int(abs(number) >= 10**digits)
