"""Small changes of Python source, each at one place, and source that notes which of its places were run.

``benchmarks/mutate.py`` asks with them what the tests would see. A place is a statement, or the body
of a lambda; its line stands for it.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
UNTOLD = ("__slots__", "__all__", "REMEMBERED", "MOST_KEPT", "KEPT_EVENTS", "FEW_EVENTS")
"""How names begin whose values are in no answer: what a module shows, how much caches keep, how many rows are told."""
REFUSING = ("check", "refuse", "choice", "says_")
"""How names begin of what is called for nothing but to refuse: nothing takes what it gives."""
SAID = ("str", "tuple[str, ...]", "Iterator[str]")
"""What functions return that are called ``..._words``: assumptions, notes and names of rows."""
LARGE = 1000
"""From here on a number is doubled: one more of so many is in no answer that is rounded, and a limit of a million is as good by one."""
RENAMED = {"max": "min", "min": "max", "any": "all", "all": "any", "reversed": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    path: str
    line: int
    place: int
    """The line of the statement or lambda that it is part of."""
    start: int
    stop: int
    """Bytes of the file that are put in the place of others."""
    before: str
    after: str
    name: str = ""
    """Of the argument, the field or the variable that it gives a value; empty where that has none."""

    def source(self, root: Path) -> bytes:
        """The whole file with it."""
        text = (root / self.path).read_bytes()
        return text[: self.start] + self.after.encode() + text[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_short(self.before)}  ->  {_short(self.after)}"


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 70 else f"{words[:67]}..."


class Finder(ast.NodeVisitor):
    """Every mutant of a module. What is only said or checked is left out: annotations, decorators,
    messages of errors and notes, what only a type checker reads, how much a cache keeps."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.bytes = source.encode()
        self.found: list[Mutant] = []
        self.place = 0
        self.name = ""
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def change(self, node: ast.expr | ast.stmt, after: ast.expr | ast.stmt | str) -> None:
        """Note a mutant that has something else in a node's place."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        stop = self.starts[node.end_lineno - 1] + node.end_col_offset
        text = after if isinstance(after, str) else f"({ast.unparse(after)})"
        before = self.bytes[start:stop].decode()
        place = self.path, node.lineno, self.place, start, stop
        self.found.append(Mutant(*place, before, text, self.name))

    def visit_value(self, name: str, value: ast.expr) -> None:
        """What is given to a name."""
        outer, self.name = self.name, name
        self.visit(value)
        self.name = outer

    def visit(self, node: ast.AST) -> None:
        """Note which statement it is that is looked through."""
        outer = self.place
        if isinstance(node, ast.stmt):
            self.place = node.lineno
        super().visit(node)
        self.place = outer

    def visit_Lambda(self, node: ast.Lambda) -> None:
        outer, self.place = self.place, node.lineno
        self.visit(node.body)
        self.place = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The body, without the docstring; a default counts where the body runs, and where that names it."""
        if _is_saying(node):
            return
        self.place = node.body[-1].lineno if len(node.body) == 1 else node.body[1].lineno
        for each in _defaults_read(node):
            self.visit(each)
        self.visit_body(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_body(node.body)

    def visit_body(self, body: Sequence[ast.stmt]) -> None:
        for each in body:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue
            self.visit(each)

    def visit_Module(self, node: ast.Module) -> None:
        self.visit_body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_value(_name_of(node.target), node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [_name_of(each) for each in node.targets]
        if not any(name.startswith(UNTOLD) for name in names):
            self.visit_value(names[0], node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """What it says is no estimate."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nor is what a type checker is told."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_keyword(self, node: ast.keyword) -> None:
        """How much a cache keeps changes no answer, nor whether lengths are compared that are equal."""
        if node.arg not in ("maxsize", "strict"):
            self.visit_value(node.arg or self.name, node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if all(map(_only_says, node.body)) and not node.orelse:
            return
        refuses = any(isinstance(each, ast.Raise) for each in node.body)
        if not refuses:
            self.change(node.test, ast.UnaryOp(ast.Not(), node.test))
            self.visit(node.test)
        # What stands before a refusal in its block makes its words.
        for each in (
            node.orelse if isinstance(node.body[-1], ast.Raise) else (*node.body, *node.orelse)
        ):
            self.visit(each)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.change(node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            operator = COMPARED[type(node.ops[0])]()
            self.change(node, ast.Compare(node.left, [operator], node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = COMPUTED.get(type(node.op))
        if other is not None and not _joins_text(node):
            self.change(node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        other = COMPUTED.get(type(node.op))
        if other is not None:
            self.change(node, ast.unparse(ast.AugAssign(node.target, other(), node.value)))
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.change(node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.change(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int):
            self.change(node, str(node.value + 1 if node.value < LARGE else 2 * node.value))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in RENAMED:
            self.change(node.func, RENAMED[node.func.id])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for what it does is not made; one that only refuses changes no answer, as a ``raise`` does not."""
        if isinstance(node.value, ast.Call):
            if _called(node.value).lstrip("_").startswith(REFUSING):
                return
            self.change(node, "pass")
        self.generic_visit(node)


def _defaults_read(node: ast.FunctionDef) -> list[ast.expr]:
    """The defaults of arguments that the body reads: one that is only there for a signature's sake is in no answer.

    >>> (function,) = ast.parse("def f(x, y=1, *, z=2): return x + y").body
    >>> [ast.unparse(each) for each in _defaults_read(function)]
    ['1']
    """
    body = [each for statement in node.body for each in ast.walk(statement)]
    read = {each.id for each in body if isinstance(each, ast.Name)}
    given = node.args
    by_place = [*given.posonlyargs, *given.args]
    pairs = [
        *zip(reversed(by_place), reversed(given.defaults), strict=False),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    return [each for argument, each in pairs if each is not None and argument.arg in read]


def _name_of(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""


def names_read(statement: ast.stmt) -> set[str]:
    """Names and attributes that it reads itself, and not in the statements that it holds.

    >>> sorted(names_read(ast.parse("if a.b > c: d()").body[0]))
    ['a', 'b', 'c']
    """
    found = set()
    left: list[ast.AST] = [statement]
    while left:
        for each in ast.iter_child_nodes(left.pop()):
            if isinstance(each, ast.stmt):
                continue
            left.append(each)
            if isinstance(each, ast.Attribute):
                found.add(each.attr)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                found.add(each.id)
    return found


def _is_saying(node: ast.FunctionDef) -> bool:
    """Whether all that it gives is words to be shown, as its name and its type say; what is read of a setup is none.

    >>> [_is_saying(ast.parse(f"def {each}: pass").body[0]) for each in ("stage_words() -> str", "num_words() -> int")]
    [True, False]
    """
    is_named = node.name.endswith("_words") and not node.name.startswith("read")
    return is_named and node.returns is not None and ast.unparse(node.returns) in SAID


def _only_says(statement: ast.stmt) -> bool:
    """Whether it adds words to others, or a note to a list, and does nothing else."""
    if isinstance(statement, ast.AugAssign):
        return _is_text(statement.value)
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    is_append = isinstance(call.func, ast.Attribute) and call.func.attr == "append"
    return is_append and isinstance(call.args[0], ast.JoinedStr)


def _called(call: ast.Call) -> str:
    """The name of what is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _joins_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(each, ast.List | ast.Tuple) or _is_text(each) for each in sides)


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """All that can be made of one module."""
    source = path.read_text(encoding="utf-8")
    finder = Finder(path.relative_to(root).as_posix(), source)
    finder.visit(ast.parse(source))
    return finder.found


RAN = "__ran__"
"""What a module that was marked calls the array it notes its places in."""


class Marker(ast.NodeTransformer):
    """A module in which each place that is run says so first: ``__ran__[first + line] = 1``."""

    def __init__(self, first: int) -> None:
        self.first = first

    def noted(self, node: ast.stmt | ast.expr) -> ast.Subscript:
        """The element of the array that stands for it."""
        index = ast.Constant(self.first + node.lineno)
        return ast.Subscript(ast.Name(RAN, ast.Load()), index, ast.Store())

    def visit(self, node: ast.AST) -> ast.AST:
        """Mark every statement of each of its blocks."""
        super().generic_visit(node)
        if isinstance(node, ast.Lambda):
            note = ast.Call(
                ast.Attribute(ast.Name(RAN, ast.Load()), "__setitem__", ast.Load()),
                [ast.Constant(self.first + node.lineno), ast.Constant(1)], [],
            )  # fmt: skip
            both = ast.Tuple([note, node.body], ast.Load())
            node.body = ast.Subscript(both, ast.Constant(1), ast.Load())
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                setattr(node, name, self.marked(block))
        return node

    def marked(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        """A block with a note before each statement that may have one before it."""
        found: list[ast.stmt] = []
        for number, each in enumerate(block):
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            is_future = isinstance(each, ast.ImportFrom) and each.module == "__future__"
            if not is_future and not (is_text and number == 0):
                found.append(ast.Assign([self.noted(each)], ast.Constant(1)))
            found.append(each)
        return found


def marked(source: str, first: int) -> ast.Module:
    """The module with its marks.

    >>> ran = bytearray(10)
    >>> code = marked("def double(x):\\n    return 2 * x\\ndouble(1)", 5)
    >>> exec(compile(code, "example", "exec"), {RAN: ran})
    >>> [line for line in range(5) if ran[5 + line]]
    [1, 2, 3]
    """
    tree = Marker(first).visit(ast.parse(source))
    assert isinstance(tree, ast.Module)
    return ast.fix_missing_locations(tree)
