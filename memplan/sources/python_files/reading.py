"""What a function of a Python file makes: constants, sums of numbers, and calls of classes with their arguments.

``config.py:function`` names it. A call of a class, or of a function that the file does not have, is a mapping of its arguments;
what would have to be run to be known is its own text in ``${}``, which readers of keys refuse where they need the value. What
could change the result and is not followed, such as a loop, is refused with its line.
"""

import ast
from typing import NoReturn

from memplan.errors import ConfigError, did_you_mean
from memplan.sources.python_files.values import CALL, CLASS, Opaque, Scope, expression
from memplan.text import shortened

MAX_VALUES = 10_000
"""Values that a configuration holds, those that stand in it several times counted as often."""


def made_by(text: str, name: str | None, *, label: str, folder: str = "") -> dict[str, object]:
    """The configuration that the function ``name`` returns, with plain values and mappings; ``folder`` is the file's package.

    Raises ``ConfigError``, of one line, where there is no such function or it cannot be followed.

    >>> made_by("def small():\\n    return A.Config(steps=2 * 5, b=B(1))", "small", label="a.py:small")
    {'_class_': 'A.Config', 'steps': 10, 'b': {'_class_': 'B', '_args_': [1]}}
    """
    try:
        scope = Scope(_parsed(text, label), label, folder)
        if name not in scope.functions:
            _refuse(label, _which(name, scope, label))
        found = plain(expression(ast.Call(ast.Name(str(name)), [], []), {}, scope))
    except RecursionError:
        _refuse(label, "is nested or calls itself more deeply than is followed")
    made = found if isinstance(found, dict) else {}
    if not str(made.get(CLASS, "")).endswith("Config"):
        other = f"what {made[CALL]} makes" if CALL in made else "no Config(...)"
        _refuse(
            label,
            f"{name} returns {other}, which is not in this file: name a function that returns a Config(...)",
        )
    return made


def _which(name: str | None, scope: Scope, label: str) -> str:
    """What to name instead: a function without arguments that is declared to return a configuration."""
    known = [
        each.name
        for each in scope.functions.values()
        if each.returns is not None
        and ast.unparse(each.returns).endswith("Config")
        and not (each.args.args or each.args.kwonlyargs)
    ]
    if name is not None and scope.functions:
        return f"has no function {name:.60}.{did_you_mean(name, known or [*scope.functions])}"
    if not known:
        return "is Python, which is not run: give a file of settings, or what it sets as options"
    return (
        f"is Python, which is not run: name the function whose configuration is to be read, as {label}:{known[0]} "
        f"({shortened(', '.join(known), 300)})"
    )


def _parsed(text: str, label: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        _refuse(label, f"is not Python: {error.msg} at line {error.lineno}")
    except (ValueError, MemoryError):
        _refuse(
            label, "is not Python that is read: it is nested too deeply, or holds a null character"
        )


def plain(value: object) -> object:
    """The value with what is not known as its text; refused where it holds itself or too much.

    >>> plain({"a": Opaque("run()"), "b": (1,)})
    {'a': '${run()}', 'b': [1]}
    """
    left = MAX_VALUES

    def copied(each: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise RecursionError
        if isinstance(each, Opaque):
            return f"${{{shortened(each.text, 80)}}}"
        if isinstance(each, dict):
            return {str(key): copied(inner) for key, inner in each.items()}
        if isinstance(each, list | tuple):
            return [copied(inner) for inner in each]
        return each

    return copied(value)


def _refuse(label: str, problem: str) -> NoReturn:
    msg = f"{label}: {problem}"
    raise ConfigError(msg) from None
