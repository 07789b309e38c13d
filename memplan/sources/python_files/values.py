"""Python's expressions and statements as far as they are followed without being run."""

import ast
import operator
from collections.abc import Callable
from typing import Any, NoReturn

from memplan.errors import ConfigError
from memplan.fast_dataclass import dataclass

CLASS, CALL, ARGUMENTS, FROM = "_class_", "_call_", "_args_", "_from_"
"""Of a mapping that stands for a call: the class, or else the function; its places; the module that has it."""
MAX_DEPTH, MAX_CALLS = 20, 500
_LARGEST = 10**30
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_SKIPPED = (ast.Assert, ast.Pass, ast.Import, ast.ImportFrom)
Names = dict[str, object]


@dataclass(frozen=True, slots=True)
class Opaque:
    """What would have to be run to be known."""

    text: str


class Scope:
    """A file's own functions, constants and imports."""

    def __init__(self, module: ast.Module, label: str, folder: str) -> None:
        self.label = label
        self.functions = {
            each.name: each for each in module.body if isinstance(each, ast.FunctionDef)
        }
        self.constants: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        """The module and the name there of what is imported."""
        self.depth = self.calls = 0
        for each in module.body:
            target = (
                each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
            )
            value = getattr(each, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                self.constants[target.id] = value
            if isinstance(each, ast.ImportFrom):
                module_name = "." * each.level + (each.module or "")
                if each.level == 1:
                    module_name = f"{folder}{module_name}".strip(".")
                for name in each.names:
                    self.imported[name.asname or name.name] = (module_name, name.name)

    def refuse(self, node: ast.AST, problem: str) -> NoReturn:
        """Say what is not followed, and where."""
        msg = f"{self.label}: line {getattr(node, 'lineno', '?')}: {problem}"
        raise ConfigError(msg)


def expression(node: ast.expr, names: Names, scope: Scope) -> object:
    """What an expression comes to; ``Opaque`` where it would have to be run."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str | int | float | None) else _opaque(node)
    if isinstance(node, ast.Name):
        return _named(node, names, scope)
    if isinstance(node, ast.Attribute):
        inner = expression(node.value, names, scope)
        return inner[node.attr] if isinstance(inner, dict) and node.attr in inner else _opaque(node)
    if isinstance(node, ast.List | ast.Tuple):
        return [expression(each, names, scope) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            str(getattr(key, "value", key)): expression(each, names, scope) for key, each in pairs
        }
    if isinstance(node, ast.Call):
        return _called(node, names, scope)
    if isinstance(node, ast.IfExp):
        chosen = expression(node.test, names, scope)
        known = not isinstance(chosen, Opaque | dict)
        return (
            expression(node.body if chosen else node.orelse, names, scope)
            if known
            else _opaque(node)
        )
    return _reckoned(node, names, scope)


def _reckoned(node: ast.expr, names: Names, scope: Scope) -> object:
    """Sums and comparisons of numbers, and what is true of them."""
    if isinstance(node, ast.UnaryOp):
        value = expression(node.operand, names, scope)
        if isinstance(node.op, ast.Not) and isinstance(value, bool):
            return not value
        return -value if isinstance(node.op, ast.USub) and _is_number(value) else _opaque(node)  # type: ignore[operator]
    if isinstance(node, ast.BoolOp):
        parts = [expression(each, names, scope) for each in node.values]
        if not all(isinstance(each, bool) for each in parts):
            return _opaque(node)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.BinOp):
        sides, done = (node.left, node.right), _BINARY.get(type(node.op))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides, done = (node.left, node.comparators[0]), _COMPARED.get(type(node.ops[0]))
    else:
        return _opaque(node)
    first, second = (expression(each, names, scope) for each in sides)
    if done is None or not (_is_number(first) and _is_number(second)):
        return _opaque(node)
    try:
        found: object = done(first, second)
    except ArithmeticError:
        scope.refuse(node, f"{ast.unparse(node):.60} has no result")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _opaque(node: ast.expr) -> Opaque:
    return Opaque(" ".join(ast.unparse(node).split()))


def _named(node: ast.Name, names: Names, scope: Scope) -> object:
    if node.id in names:
        return names[node.id]
    if node.id not in scope.constants:
        return _opaque(node)
    with_depth(scope, node)
    found = expression(scope.constants[node.id], {}, scope)
    scope.depth -= 1
    return found


def with_depth(scope: Scope, node: ast.AST) -> None:
    """One level further in, of as many as are followed."""
    scope.depth += 1
    scope.calls += 1
    if scope.depth > MAX_DEPTH or scope.calls > MAX_CALLS:
        scope.refuse(node, "calls itself, or calls more functions than are followed")


def _called(node: ast.Call, names: Names, scope: Scope) -> object:
    """What the file's own function returns; of another one, or a class, a mapping of what it is given."""
    places = [expression(each, names, scope) for each in node.args]
    given = {each.arg or "**": expression(each.value, names, scope) for each in node.keywords}
    own = scope.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if own is not None:
        with_depth(scope, node)
        found = _returned(own, _bound(own, places, given, scope), scope)
        scope.depth -= 1
        return found
    name = " ".join(ast.unparse(node.func).split())
    is_class = name.rpartition(".")[2][:1].isupper()
    made: dict[str, object] = {CLASS if is_class else CALL: name}
    if name in scope.imported and not is_class:
        made[FROM], made[CALL] = scope.imported[name]
    return made | ({ARGUMENTS: places} if places else {}) | given


def _bound(own: ast.FunctionDef, places: list[object], given: Names, scope: Scope) -> Names:
    """A function's names, as it is called."""
    asked = own.args
    if own.decorator_list or asked.vararg or asked.kwarg or "**" in given:
        scope.refuse(own, f"{own.name} is called or declared in a way that is not followed")
    in_order = [each.arg for each in (*asked.posonlyargs, *asked.args)]
    defaults = dict(zip(reversed(in_order), reversed(asked.defaults), strict=False))
    defaults |= {
        each.arg: value
        for each, value in zip(asked.kwonlyargs, asked.kw_defaults, strict=True)
        if value
    }
    found: Names = {name: expression(value, {}, scope) for name, value in defaults.items()}
    found |= dict(zip(in_order, places, strict=False)) | given
    everything = {*in_order, *(each.arg for each in asked.kwonlyargs)}
    if len(places) > len(in_order) or found.keys() != everything:
        scope.refuse(
            own,
            f"{own.name} takes {', '.join(sorted(everything)) or 'no arguments'}, and is called otherwise",
        )
    return found


def _returned(own: ast.FunctionDef, names: Names, scope: Scope) -> object:
    """What a function's statements come to."""
    found = _followed(own.body, names, scope)
    if found is None:
        scope.refuse(own, f"{own.name} returns nothing")
    return found[0]


def _followed(body: list[ast.stmt], names: Names, scope: Scope) -> tuple[object] | None:
    """What is returned by these statements, if anything is; names are set on the way."""
    for each in body:
        if isinstance(each, ast.Return):
            return (expression(each.value, names, scope),) if each.value else None
        if isinstance(each, ast.If):
            chosen = expression(each.test, names, scope)
            if isinstance(chosen, Opaque) and _is_guard(each):
                continue
            if not isinstance(chosen, bool | int | None):
                scope.refuse(
                    each, f"whether {ast.unparse(each.test):.60} is not known without running it"
                )
            found = _followed(each.body if chosen else each.orelse, names, scope)
            if found is not None:
                return found
        elif isinstance(each, ast.FunctionDef):
            names[each.name] = Opaque(each.name)
        elif not isinstance(each, _SKIPPED):
            _set(each, names, scope)
    return None


def _is_guard(branch: ast.If) -> bool:
    """Whether all that a branch does is to stop."""
    return not branch.orelse and all(isinstance(each, ast.Raise) for each in branch.body)


def _set(statement: ast.stmt, names: Names, scope: Scope) -> None:
    """A name or an attribute given a value; another statement is refused if it could change one."""
    if isinstance(statement, ast.Expr):
        touched = [each.id for each in ast.walk(statement) if isinstance(each, ast.Name)]
        if any(isinstance(names.get(name), dict | list) for name in touched):
            scope.refuse(
                statement, f"{ast.unparse(statement):.60} may change the result, and is not run"
            )
        return
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        scope.refuse(statement, f"{ast.unparse(statement).splitlines()[0]:.60} is not followed")
    found = expression(value, names, scope)
    if isinstance(target, ast.Name):
        names[target.id] = found
    elif isinstance(target, ast.Attribute):
        _section(target.value, names, scope)[target.attr] = found
    else:
        scope.refuse(statement, f"{ast.unparse(statement):.60} is not followed")


def _section(node: ast.expr, names: Names, scope: Scope) -> Names:
    """The mapping that an attribute is set in; a section whose defaults are all the file leaves is made."""
    found: object = None
    if isinstance(node, ast.Name):
        found = names.get(node.id)
    elif isinstance(node, ast.Attribute):
        found = _section(node.value, names, scope).setdefault(node.attr, {})
    if not isinstance(found, dict):
        scope.refuse(
            node, f"{ast.unparse(node):.60} is made elsewhere: what is set in it is not followed"
        )
    return found
