"""``fast_dataclass`` makes what the standard decorator makes."""

import copy
import dataclasses
import inspect
import pickle
import re
import sys
from dataclasses import FrozenInstanceError, field, fields, is_dataclass, replace
from typing import Any

import pytest

import memplan.fast_dataclass
from memplan.fast_dataclass import HashedOnce
from memplan.fast_dataclass import dataclass as fast_dataclass
from memplan.fast_dataclass import replace as fast_replace

MADE_UNCOMPILED: int = memplan.fast_dataclass.MADE_UNCOMPILED  # type: ignore[attr-defined]


def define(decorate: Any, *, frozen: bool, kw_only: bool, slots: bool) -> Any:
    @decorate(frozen=frozen, kw_only=kw_only, slots=slots)
    class Thing:
        size: int
        name: str = "none"
        parts: list[int] = field(default_factory=list)
        hidden: int = field(default=0, repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                msg = "size: must not be negative"
                raise ValueError(msg)

    return Thing


SHAPES = [
    {"frozen": frozen, "kw_only": kw_only, "slots": slots}
    for frozen in (True, False)
    for kw_only in (True, False)
    for slots in (True, False)
]


@pytest.mark.parametrize("shape", SHAPES)
class TestLikeTheStandardOne:
    def test_its_signature(self, shape: dict[str, bool]) -> None:
        ours, theirs = define(fast_dataclass, **shape), define(dataclasses.dataclass, **shape)
        for one, other in zip(
            inspect.signature(ours).parameters.values(),
            inspect.signature(theirs).parameters.values(),
            strict=True,
        ):
            assert (one.name, one.kind, one.annotation) == (
                other.name,
                other.kind,
                other.annotation,
            )
            assert (one.default is one.empty) == (other.default is other.empty)

    def test_a_changed_copy(self, shape: dict[str, bool]) -> None:
        thing = define(fast_dataclass, **shape)(size=1, parts=[3], hidden=4)
        for changes in ({}, {"size": 2}, {"name": "b", "hidden": 0}):
            ours, theirs = fast_replace(thing, **changes), replace(thing, **changes)
            assert type(ours) is type(theirs)
            assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
        assert fast_replace(thing).parts is thing.parts

    def test_a_copy_that_is_made_often(self, shape: dict[str, bool]) -> None:
        # Before what makes it is compiled, and after.
        thing = define(fast_dataclass, **shape)(size=1, parts=[3], hidden=4)
        for size in range(2 * MADE_UNCOMPILED):
            ours, theirs = (each(thing, name="b", size=size) for each in (fast_replace, replace))
            assert type(ours) is type(theirs)
            assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
            assert ours.parts is thing.parts
            with pytest.raises(ValueError, match="negative"):
                fast_replace(thing, size=-1)
            with pytest.raises(TypeError, match="weight"):
                fast_replace(thing, weight=1)

    def test_the_first_are_as_later_ones_are(self, shape: dict[str, bool]) -> None:
        # Before __init__ is compiled, and after.
        ours = define(fast_dataclass, **shape)
        theirs = define(dataclasses.dataclass, **shape)
        for size in range(2 * MADE_UNCOMPILED):
            one, other = ours(size=size, parts=[size]), theirs(size=size, parts=[size])
            assert dataclasses.asdict(one) == dataclasses.asdict(other)
            assert list(dataclasses.asdict(one)) == list(dataclasses.asdict(other))

    def test_what_it_cannot_be_made_from(self, shape: dict[str, bool]) -> None:
        values: dict[str, Any]
        for values in ({}, {"name": "b"}, {"size": 1, "weight": 2}, {"weight": 2}, {"size": -1}):
            ours, theirs = define(fast_dataclass, **shape), define(dataclasses.dataclass, **shape)
            with pytest.raises((TypeError, ValueError)) as expected:
                theirs(**values)
            with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
                ours(**values)

    def test_what_it_is_made_from(self, shape: dict[str, bool]) -> None:
        ours, theirs = define(fast_dataclass, **shape), define(dataclasses.dataclass, **shape)
        for values in ({"size": 1}, {"size": 2, "name": "b", "parts": [3], "hidden": 4}):
            one, other = ours(**values), theirs(**values)
            assert dataclasses.asdict(one) == dataclasses.asdict(other)
            assert repr(one) == repr(other)
            assert one == ours(**values)
            assert replace(one, hidden=9) == one
            assert replace(one, size=7) != one
            assert one != other
        assert ours(size=1).parts is not ours(size=1).parts

    def test_what_it_refuses(self, shape: dict[str, bool]) -> None:
        ours = define(fast_dataclass, **shape)
        with pytest.raises(TypeError, match=r"Thing\.__init__\(\) missing 1 required"):
            ours()
        with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
            ours(size=1, sise=2)
        if shape["kw_only"]:
            with pytest.raises(TypeError, match="positional argument"):
                ours(1)
        with pytest.raises(ValueError, match="must not be negative"):
            ours(size=-1)

    def test_whether_it_is_frozen(self, shape: dict[str, bool]) -> None:
        ours = define(fast_dataclass, **shape)
        thing = ours(size=1)
        assert is_dataclass(ours)
        assert ours.__dataclass_params__.frozen is shape["frozen"]
        if not shape["frozen"]:
            thing.size = 2
            assert thing.size == 2
            return
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'size'"):
            thing.size = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'size'"):
            del thing.size

    def test_its_copies(self, shape: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
        ours = define(fast_dataclass, **shape)
        ours.__qualname__ = "Thing"
        monkeypatch.setattr(sys.modules[__name__], "Thing", ours, raising=False)
        thing = ours(size=1, parts=[2], hidden=3)
        for again in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
            assert dataclasses.asdict(again) == dataclasses.asdict(thing)


def test_equal_frozen_ones_share_a_hash_and_others_have_none() -> None:
    @fast_dataclass(frozen=True, slots=True)
    class Place:
        row: int
        note: str = field(default="", compare=False)

    @fast_dataclass(slots=True)
    class Open:
        row: int

    assert hash(Place(1, "a")) == hash(Place(1, "b"))
    with pytest.raises(TypeError, match="unhashable"):
        hash(Open(1))


def test_a_hash_that_is_kept_is_of_one_record_alone() -> None:
    @fast_dataclass(frozen=True, slots=True)
    class Key(HashedOnce):
        parts: tuple[int, ...]

    first = Key((1, 2))
    assert hash(first) == hash(first) == hash(Key((1, 2)))
    assert hash(fast_replace(first, parts=(3,))) == hash(Key((3,))) != hash(first)
    assert first == Key((1, 2))


def test_methods_of_its_own_stay() -> None:
    @fast_dataclass(frozen=True, slots=True)
    class Named:
        name: str

        def __repr__(self) -> str:
            return f"<{self.name}>"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    assert (repr(Named("x")), Named("x") == 3, hash(Named("x"))) == ("<x>", True, 7)
    assert [each.name for each in fields(Named)] == ["name"]


@fast_dataclass(frozen=True, kw_only=True, slots=True)
class _Base:
    first: int


@fast_dataclass(frozen=True, kw_only=True, slots=True)
class _Derived(_Base):
    second: int = 2


def test_a_frozen_one_can_be_built_on_another() -> None:
    record = _Derived(first=1)
    assert (record.first, record.second) == (1, 2)
    assert [field.name for field in fields(_Derived)] == ["first", "second"]
    with pytest.raises(TypeError, match=re.escape("_Derived.__init__() got an unexpected keyword")):
        _Derived(third=3)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        record.first = 2  # type: ignore[misc]
    assert not hasattr(record, "__dict__")
