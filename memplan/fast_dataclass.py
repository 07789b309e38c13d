"""``dataclass``, with less work at import time.

The standard decorator looks at every field of a class and compiles methods of its own for it: ``__init__``, ``__repr__``,
``__eq__``, ``__hash__``, and the two that freeze it. memplan defines two hundred dataclasses before it can answer, and
a user waits for all of them. Here a class's fields are looked at, and its ``__init__`` compiled, when they are first asked
for; the other methods are shared. That takes three of four parts off what defining them takes (Python 3.11). What a
dataclass is to everyone else, ``fields``, ``replace``, pickling and its signature included, stays as it was, and type
checkers see nothing but the standard decorator. The standard module itself, which brings ``inspect`` along, is imported
when somebody else looks at a class's fields.

``replace`` is the standard one with less work for each call: a sweep makes two setups of sixty fields for every answer.
"""

from typing import TYPE_CHECKING


class HashedOnce:
    """A record by which many things are looked up: what it hashes to is found once and kept."""

    __slots__ = ("_hash",)


if TYPE_CHECKING:
    from dataclasses import MISSING, dataclass, field, fields, replace
else:
    import sys
    from operator import attrgetter
    from types import MemberDescriptorType
    from typing import ClassVar

    class _Missing:
        """No default."""

        __slots__ = ()

    MISSING = _Missing()
    _DECLARED = {}
    _LINES = {}
    _KEYS = {}
    _TAKEN = {}
    _COPYING = {}

    class _Line:
        """A line of a class that is a field, with the names that the standard library has for what it says."""

        __slots__ = ("compare", "default", "default_factory", "kw_only", "name", "repr", "type")

        def __init__(
            self, default=MISSING, default_factory=MISSING, repr=True, compare=True, kw_only=MISSING
        ):
            self.default = default
            self.default_factory = default_factory
            self.repr = repr
            self.compare = compare
            self.kw_only = kw_only

    def field(
        *, default=MISSING, default_factory=MISSING, repr=True, compare=True, kw_only=MISSING
    ):
        """What there is to say of a field beside its type."""
        return _Line(default, default_factory, repr, compare, kw_only)

    def fields(thing):
        """The fields of a dataclass, or of one of its objects."""
        cls = thing if isinstance(thing, type) else thing.__class__
        lines = _LINES.get(cls)
        if lines is None:
            lines = _LINES[cls] = tuple(_lines_of(cls).values())
        return lines

    def _lines_of(cls):
        found = {}
        for base in reversed(cls.__mro__):
            declared = _DECLARED.get(base)
            if declared is not None:
                found |= declared.lines()
            elif "__dataclass_fields__" in base.__dict__:  # of the standard decorator's
                found |= {
                    each.name: _as_line(each) for each in sys.modules["dataclasses"].fields(base)
                }
        return found

    def dataclass(cls=None, /, *, repr=True, eq=True, frozen=False, kw_only=False, slots=False):
        """Define a dataclass; the options are the standard decorator's."""

        def define(cls):
            own = cls.__dict__
            declared = _Declared(cls, kw_only)
            made = _with_slots(cls, declared) if slots else _with_defaults(cls, declared)
            declared.made = made
            _DECLARED[made] = declared
            made.__dataclass_fields__ = declared
            made.__dataclass_params__ = _PARAMETERS[frozen]
            made.__init__ = _Init(made, _init_frozen if frozen else _init_open)
            made.__replace__ = _replaced  # which copy.replace asks for (Python 3.13)
            if repr and "__repr__" not in own:
                made.__repr__ = _repr
            if eq and "__eq__" not in own:
                made.__eq__ = _eq
                if "__hash__" not in own:
                    once = issubclass(made, HashedOnce)
                    made.__hash__ = (_hash_once if once else _hash) if frozen else None
            if frozen:
                made.__setattr__, made.__delattr__ = _refuse_assignment, _refuse_deletion
                made.__getstate__, made.__setstate__ = _values_of_all, _restore
            return made

        return define if cls is None else define(cls)

    class _Parameters:
        """``__dataclass_params__``, which the standard library makes when it is first asked for."""

        __slots__ = ("frozen",)

        def __init__(self, *, frozen):
            self.frozen = frozen

        def __get__(self, instance, owner=None):
            from dataclasses import make_dataclass

            return make_dataclass("Looked", (), frozen=self.frozen).__dataclass_params__

    _PARAMETERS = {frozen: _Parameters(frozen=frozen) for frozen in (True, False)}

    class _Declared:
        """``__dataclass_fields__``, found when it is first looked up; it then takes this one's place."""

        __slots__ = ("annotations", "defaults", "kw_only", "made")

        def __init__(self, cls, kw_only):
            own = cls.__dict__
            self.annotations = {
                name: kind
                for name, kind in cls.__annotations__.items()
                if kind is not ClassVar and getattr(kind, "__origin__", None) is not ClassVar
            }
            self.defaults = {name: own[name] for name in self.annotations if name in own}
            self.kw_only = kw_only

        def lines(self):
            """The class's own fields."""
            return {
                name: _line(name, kind, self.defaults.get(name, MISSING), self.kw_only)
                for name, kind in self.annotations.items()
            }

        def __get__(self, instance, owner=None):
            found = {}
            for name, line in _lines_of(self.made).items():
                found[name] = _as_standard(line)
            self.made.__dataclass_fields__ = found
            return found

    def _is_field(default):
        standard = sys.modules.get("dataclasses")
        is_standard = standard is not None and isinstance(default, standard.Field)
        return is_standard or isinstance(default, _Line)

    def _line(name, kind, default, kw_only):
        """What a line of the class says."""
        if isinstance(default, _Line):
            made = default
        elif _is_field(default):
            made = _as_line(default)
        else:
            made = _Line(default)
        made.name, made.type = name, kind
        if made.kw_only is MISSING:
            made.kw_only = kw_only
        return made

    def _as_line(standard):
        """A field of the standard library's."""
        import dataclasses

        def own(value):
            return MISSING if value is dataclasses.MISSING else value

        made = _Line(
            own(standard.default), own(standard.default_factory), standard.repr, standard.compare,
            own(standard.kw_only),
        )  # fmt: skip
        made.name, made.type = standard.name, standard.type
        return made

    def _as_standard(line):
        """A field as the standard library has it."""
        import dataclasses

        said = {"repr": line.repr, "compare": line.compare, "kw_only": line.kw_only}
        if line.default is not MISSING:
            said["default"] = line.default
        if line.default_factory is not MISSING:
            said["default_factory"] = line.default_factory
        made = dataclasses.field(**said)
        made.name, made.type, made._field_type = line.name, line.type, dataclasses._FIELD
        return made

    def _with_slots(cls, declared):
        """The class once more, with a slot for each field that no base has one for."""
        kept = dict(cls.__dict__)
        for name in (*declared.annotations, "__dict__", "__weakref__"):
            kept.pop(name, None)
        taken = {
            name
            for base in cls.__mro__[1:-1]
            for name in _names_of(base.__dict__.get("__slots__", ()))
        }
        kept["__slots__"] = tuple(name for name in declared.annotations if name not in taken)
        made = type(cls)(cls.__name__, cls.__bases__, kept)
        made.__qualname__ = cls.__qualname__
        return made

    def _names_of(slots):
        return (slots,) if isinstance(slots, str) else slots

    def _with_defaults(cls, declared):
        """The class itself, its defaults where the standard decorator leaves them."""
        for name, default in declared.defaults.items():
            if not _is_field(default):
                continue
            line = default if isinstance(default, _Line) else _as_line(default)
            if line.default is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, line.default)
        return cls

    class _Init:
        """``__init__``, compiled when a class has been made so often that it pays, or when somebody looks at it; it then
        takes this one's place."""

        __slots__ = ("cls", "left", "line", "plan")

        def __init__(self, cls, line):
            self.cls = cls
            self.line = line
            self.left = MADE_UNCOMPILED
            self.plan = None

        def __get__(self, instance, owner=None):
            if instance is not None and self.left:
                self.left -= 1
                return _Filling(self, instance)
            return self.compiled().__get__(instance, owner)

        def compiled(self):
            init = self.cls.__init__ = _compiled_init(self.cls, self.line)
            return init

    class _Filling:
        """One object's fields, filled in one by one from what is given."""

        __slots__ = ("init", "instance")

        def __init__(self, init, instance):
            self.init = init
            self.instance = instance

        def __call__(self, /, *given, **named):
            init, instance = self.init, self.instance
            plan = init.plan
            if plan is None:
                plan = init.plan = _plan_of(init.cls)
            names, kept, made_anew, has_more, in_order = plan
            if given:
                placed = dict(zip(in_order, given, strict=False))
                fits = len(placed) == len(given) and placed.keys().isdisjoint(named)
                told = placed | named
            else:
                fits, told = True, named
            values = {**kept, **told}
            for name, make in made_anew:
                if name not in told:
                    values[name] = make()
            if not fits or len(values) != len(names) or not names.issuperset(told):
                # The compiled one says what does not fit as everybody's does.
                init.compiled()(instance, *given, **named)
                return
            for name, value in values.items():
                _set(instance, name, value)
            if has_more:
                instance.__post_init__()

    MADE_UNCOMPILED = 40
    """Objects of a class that are filled in before its ``__init__`` is compiled: most classes have fewer, and to compile
    (30 to 250 µs) takes as long as to fill so many of them in (1 to 5 µs each, a third of which is left)."""
    _set = object.__setattr__

    def _plan_of(cls):
        """The fields' names, those with a default and those with what makes one, whether more is to be done, and
        which may be given by position."""
        lines = fields(cls)
        kept = {each.name: each.default for each in lines if each.default is not MISSING}
        made_anew = [
            (each.name, each.default_factory)
            for each in lines
            if each.default_factory is not MISSING and each.default is MISSING
        ]
        names = frozenset(each.name for each in lines)
        in_order = tuple(each.name for each in lines if not each.kw_only)
        return names, kept, made_anew, hasattr(cls, "__post_init__"), in_order

    def _init_open(name, value, _names, _cls):
        return f"    self.{name} = {value}"

    def _init_frozen(name, value, names, cls):
        """A slot takes a value in half the time that ``object.__setattr__`` needs to find it."""
        slot = getattr(cls, name, None)
        if not isinstance(slot, MemberDescriptorType):
            return f"    _set(self, {name!r}, {value})"
        names[f"_set_{name}"] = slot.__set__
        return f"    _set_{name}(self, {value})"

    def _compiled_init(cls, line):
        """What the standard decorator would have made."""
        names = {"_set": object.__setattr__, "_MISSING": MISSING}
        positional, by_keyword, body = [], [], []
        for field in fields(cls):
            parameter = value = field.name
            if field.default is not MISSING:
                names[f"_default_{field.name}"] = field.default
                parameter = f"{field.name}=_default_{field.name}"
            elif field.default_factory is not MISSING:
                names[f"_make_{field.name}"] = field.default_factory
                parameter = f"{field.name}=_MISSING"
                value = f"_make_{field.name}() if {field.name} is _MISSING else {field.name}"
            (by_keyword if field.kw_only else positional).append(parameter)
            body.append(line(field.name, value, names, cls))
        if hasattr(cls, "__post_init__"):
            body.append("    self.__post_init__()")
        star = ["*"] if by_keyword else []
        head = f"def __init__({', '.join(['self', *positional, *star, *by_keyword])}):"
        exec("\n".join([head, *(body or ["    pass"])]), names)  # noqa: S102
        init = names["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        init.__annotations__ = {field.name: field.type for field in fields(cls)} | {"return": None}
        return init

    def _refuse_assignment(_self, name, _value):
        from dataclasses import FrozenInstanceError

        message = f"cannot assign to field {name!r}"
        raise FrozenInstanceError(message)

    def _refuse_deletion(_self, name):
        from dataclasses import FrozenInstanceError

        message = f"cannot delete field {name!r}"
        raise FrozenInstanceError(message)

    def _values_of_all(self):
        return [getattr(self, field.name) for field in fields(self)]

    def _restore(self, values):
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    def _values(record):
        """The values that count when records are compared."""
        kind = record.__class__
        key = _KEYS.get(kind)
        if key is None:
            names = [field.name for field in fields(kind) if field.compare]
            key = _KEYS[kind] = attrgetter(*names) if names else _nothing
        return key(record)

    def _nothing(_record):
        return ()

    def replace(record, /, **changes):
        """A copy with some fields changed; every field is one that ``__init__`` takes."""
        asked = record.__class__, *changes
        copying = _COPYING.get(asked, 0)
        if copying.__class__ is not int:
            return copying(record, **changes)
        is_many = copying >= MADE_UNCOMPILED
        _COPYING[asked] = _compiled_copy(*asked) if is_many else copying + 1
        return _copied(record, **changes)

    def _copied(record, /, **changes):
        """The same without anything compiled for it."""
        kind = record.__class__
        taken = _TAKEN.get(kind)
        if taken is None:
            names = tuple(field.name for field in fields(kind))
            values = attrgetter(*names) if len(names) > 1 else _values_of_all
            taken = _TAKEN[kind] = names, values, _setters(kind, names)
        names, values, setters = taken
        kept = dict(zip(names, values(record), strict=True))
        kept.update(changes)
        if setters is None or len(kept) != len(names):
            return kind(**kept)
        made = _new(kind)
        for setter, value in zip(setters, kept.values(), strict=True):
            setter(made, value)
        if hasattr(kind, "__post_init__"):
            made.__post_init__()
        return made

    def _compiled_copy(kind, *changed):
        """What copies records of this kind with these fields changed, slot by slot; without slots, whatever copies any."""
        taken, _, setters = _TAKEN[kind]
        if setters is None or not set(changed) <= set(taken):
            return _copied
        names = {"_new": _new, "_kind": kind}
        body = ["    _made = _new(_kind)"]
        for name, setter in zip(taken, setters, strict=True):
            names[f"_set_{name}"] = setter
            body.append(f"    _set_{name}(_made, {name if name in changed else f'_record.{name}'})")
        if hasattr(kind, "__post_init__"):
            body.append("    _made.__post_init__()")
        star = ["*", *changed] if changed else []
        head = f"def _copy({', '.join(['_record', '/', *star])}):"
        exec("\n".join([head, *body, "    return _made"]), names)  # noqa: S102
        return names["_copy"]

    def _replaced(self, /, **changes):
        return replace(self, **changes)

    _new = object.__new__

    def _setters(kind, names):
        """What writes each field into its slot, where all have one: sooner than ``__init__``'s arguments."""
        found = [getattr(kind, name, None) for name in names]
        is_plain = all(isinstance(each, MemberDescriptorType) for each in found)
        return [each.__set__ for each in found] if is_plain else None

    def _repr(self):
        shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
        return f"{self.__class__.__qualname__}({', '.join(shown)})"

    def _eq(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _values(self) == _values(other)

    def _hash(self):
        return hash(_values(self))

    def _hash_once(self):
        try:
            return self._hash
        except AttributeError:
            found = hash(_values(self))
            object.__setattr__(self, "_hash", found)
            return found


__all__ = ["MISSING", "HashedOnce", "dataclass", "field", "fields", "replace"]
