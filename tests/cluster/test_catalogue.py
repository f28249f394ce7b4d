"""The shared catalogue: versions, generations, copies, and what a request may be served from."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loragraph.cluster import catalogue as module
from loragraph.cluster.catalogue import Catalogue, Change, Op
from loragraph.cluster.content import Content, redacted
from loragraph.errors import (
    AdapterChangedError,
    CapacityError,
    FormatError,
    InvalidRequestError,
    LoragraphError,
    ModelNotFoundError,
    StaleCatalogueError,
)

NAMES = st.sampled_from(["a", "b", "c"])


def content_of(n: int = 0, *, pinned: bool = False) -> Content:
    """Content that differs by n."""
    return Content(f"file-{n}.gguf", f"{n:064x}", 100 + n, pinned=pinned)


def made(*steps: tuple[str, str, int]) -> Catalogue:
    """A catalogue after register and swap steps (op, name, n), and drops."""
    out = Catalogue()
    for op, name, n in steps:
        change = out.drop(name) if op == "drop" else getattr(out, op)(name, content_of(n))
        out.apply([change])
    return out


class CatalogueMachine(RuleBasedStateMachine):
    """Changes to a catalogue, a copy that follows at times, and requests resolved in between."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()
        self.copy = Catalogue()
        self.history: list[dict[str, tuple[int, Content]]] = [{}]  # the twin: all states ever
        self.requests: list[module.Resolved] = []
        self.n = 0

    def change(self, op: str, name: str, *content: Content) -> None:
        """Makes it in both, or sees it refused in both."""
        now = dict(self.history[-1])
        if (name in now) != (op != "register"):
            with pytest.raises((InvalidRequestError, ModelNotFoundError)):
                getattr(self.catalogue, op)(name, *content)
            return
        change = getattr(self.catalogue, op)(name, *content)
        self.catalogue.apply([Change.from_json(json.loads(json.dumps(change.to_json())))])
        if content:
            now[name] = (len(self.history), content[0])
        elif op == "drop":
            del now[name]
        else:
            now[name] = (now[name][0], replace(now[name][1], pinned=op == "pin"))
        self.history.append(now)

    @rule(op=st.sampled_from(["register", "swap"]), name=NAMES, pinned=st.booleans())
    def set_content(self, op: str, name: str, pinned: bool) -> None:
        self.n += 1
        self.change(op, name, content_of(self.n, pinned=pinned))

    @rule(op=st.sampled_from(["pin", "unpin", "drop"]), name=NAMES)
    def change_state(self, op: str, name: str) -> None:
        self.change(op, name)

    @rule(names=st.lists(NAMES, max_size=3, unique=True))
    def request(self, names: list[str]) -> None:
        now = self.history[-1]
        if not set(names) <= now.keys():
            with pytest.raises(ModelNotFoundError):
                self.catalogue.resolve(names)
            return
        resolved = self.catalogue.resolve(names)
        assert [one.generation for one in resolved.adapters] == [now[n][0] for n in names]
        assert [one.digest for one in resolved.adapters] == [now[n][1].digest for n in names]
        self.requests.append(resolved)

    @rule(part=st.integers(0, 5))
    def follow(self, part: int) -> None:
        changes = self.catalogue.changes_since(self.copy.version)
        assert changes is not None
        self.copy.apply(changes[:part])
        self.copy.apply(changes[: part // 2])  # again: nothing happens

    @rule()
    def restart_copy(self) -> None:
        self.copy = Catalogue.from_snapshot(json.loads(json.dumps(self.copy.snapshot())))

    @rule()
    def restart(self) -> None:
        self.copy = Catalogue.from_snapshot(self.catalogue.snapshot())
        self.catalogue = Catalogue.from_snapshot(json.loads(json.dumps(self.catalogue.snapshot())))

    @invariant()
    def copies_are_states_that_were(self) -> None:
        for one in (self.catalogue, self.copy):
            entries = {n: (e.generation, e.content) for n, e in one.entries.items()}
            assert entries == self.history[one.version]
        assert self.catalogue.version == len(self.history) - 1

    @invariant()
    def a_request_gets_exactly_what_it_was_resolved_to(self) -> None:
        for resolved in self.requests[-5:]:
            now = self.history[self.copy.version]
            try:
                got = self.copy.check(resolved)
            except StaleCatalogueError:
                assert self.copy.version < resolved.version
            except (ModelNotFoundError, AdapterChangedError):
                assert any(now.get(r.name, (0,))[0] != r.generation for r in resolved.adapters)
            else:
                assert [(e.generation, e.content.digest) for e in got] == [
                    (r.generation, r.digest) for r in resolved.adapters
                ]


CatalogueMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestCatalogueMachine = CatalogueMachine.TestCase


def test_a_copy_that_missed_a_change_never_serves_the_old_content() -> None:
    """It has to refresh, and after that has the new generation."""
    catalogue = made(("register", "a", 1))
    copy = Catalogue.from_snapshot(catalogue.snapshot())
    catalogue.apply([catalogue.swap("a", content_of(2))])
    resolved = catalogue.resolve(["a"])
    with pytest.raises(StaleCatalogueError, match="expected a catalogue of version 2, got 1"):
        copy.check(resolved)
    changes = catalogue.changes_since(copy.version)
    assert changes is not None
    copy.apply(changes)
    assert copy.check(resolved)[0].content == content_of(2)


def test_a_request_that_was_resolved_before_a_swap_is_resolved_anew_as_a_whole() -> None:
    """One of its adapters changed, so none of it is served."""
    catalogue = made(("register", "a", 1), ("register", "b", 2))
    resolved = catalogue.resolve(["a", "b"])
    catalogue.apply([catalogue.swap("b", content_of(3))])
    with pytest.raises(AdapterChangedError, match="expected generation 2, got 3"):
        catalogue.check(resolved)


def test_a_dropped_name_is_refused_and_gets_a_new_generation_when_it_comes_back() -> None:
    """Even with the same content."""
    catalogue = made(("register", "a", 1))
    old = catalogue.resolve(["a"])
    catalogue.apply([catalogue.drop("a")])
    with pytest.raises(ModelNotFoundError, match="no adapter is called 'a' at version 2"):
        catalogue.check(old)
    catalogue.apply([catalogue.register("a", content_of(1))])
    with pytest.raises(AdapterChangedError):
        catalogue.check(old)


@pytest.mark.parametrize("op", ["swap", "pin", "unpin", "drop"])
def test_a_change_of_another_generation_than_expected_is_refused(op: str) -> None:
    """So two administrators do not undo each other's work."""
    catalogue = made(("register", "a", 1), ("swap", "a", 2))
    content = (content_of(3),) if op == "swap" else ()
    with pytest.raises(AdapterChangedError, match="expected generation 1, got 2"):
        getattr(catalogue, op)("a", *content, generation=1)
    assert getattr(catalogue, op)("a", *content, generation=2).version == 3


def test_a_gap_in_the_changes_is_refused() -> None:
    """A copy would have a state that never was."""
    changes = made(("register", "a", 1), ("swap", "a", 2)).changes_since(1)
    assert changes is not None
    with pytest.raises(StaleCatalogueError, match="expected change 1 of the catalogue, got 2"):
        Catalogue().apply(changes)


def test_a_copy_that_is_far_behind_or_ahead_takes_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Changes are kept up to a bound, and none for versions that never were."""
    monkeypatch.setattr(module, "MAX_CHANGES", 2)
    catalogue = made(("register", "a", 1), ("swap", "a", 2), ("swap", "a", 3))
    assert catalogue.changes_since(0) is None
    assert catalogue.changes_since(4) is None
    assert [one.version for one in catalogue.changes_since(1) or []] == [2, 3]
    assert catalogue.changes_since(3) == []


def test_the_number_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused; a swap is not."""
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    catalogue = made(("register", "a", 1))
    with pytest.raises(CapacityError, match="at most 1 adapters"):
        catalogue.register("b", content_of(2))
    assert catalogue.swap("a", content_of(2)).op is Op.SWAP


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("source", "x" * 5000),
        ("source", "a\0b"),
        ("source", "http://[x"),
        ("source", "https://user:secret@host/a.gguf"),
        ("digest", "0" * 63),
        ("digest", "Z" * 64),
        ("size_bytes", -1),
        ("size_bytes", True),
        ("size_bytes", 2**80),
        ("scale", float("nan")),
        ("scale", 1e300),
        ("scale", "1"),
        ("pinned", 1),
    ],
)
def test_content_that_cannot_be_is_refused_without_telling_secrets(
    field: str, value: object
) -> None:
    """With the name of the field."""
    with pytest.raises(InvalidRequestError) as caught:
        replace(content_of(1), **{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert "secret" not in str(caught.value)


def test_a_source_is_shown_without_what_signs_it() -> None:
    """Neither by repr() nor by redacted()."""
    source = "https://user:pw@host:8/dir/a.gguf?X-Signature=secret#frag"
    assert redacted(source) == "https://host:8/dir/a.gguf"
    assert redacted("dir/a?b#c.gguf") == "dir/a?b#c.gguf"
    assert "secret" not in repr(Content("s3://b/a?sig=secret", "0" * 64, 1))


GOOD = made(("register", "a", 1)).snapshot()
GOOD_CHANGE = Change(1, Op.REGISTER, "a", content_of(1)).to_json()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        GOOD | {"version": -1},
        GOOD | {"version": True},
        GOOD | {"version": 0},
        GOOD | {"entries": None},
        GOOD | {"more": 1},
        GOOD | {"entries": GOOD["entries"] * 2},
        GOOD | {"entries": [GOOD["entries"][0] | {"name": "../x"}]},
        GOOD | {"entries": [GOOD["entries"][0] | {"generation": 2}]},
        GOOD | {"entries": [GOOD["entries"][0] | {"content": {}}]},
        GOOD | {"entries": [5]},
    ],
)
def test_a_snapshot_that_is_none_is_refused(bad: object) -> None:
    """With FormatError, whatever is wrong."""
    with pytest.raises(FormatError):
        Catalogue.from_snapshot(bad)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        GOOD_CHANGE | {"op": "explode"},
        GOOD_CHANGE | {"op": ["register"]},
        GOOD_CHANGE | {"op": "drop"},
        GOOD_CHANGE | {"name": 5},
        GOOD_CHANGE | {"content": None},
        GOOD_CHANGE | {"version": "1"},
        {"version": 1, "op": "swap", "name": "a"},
    ],
)
def test_a_change_that_is_none_is_refused(bad: object) -> None:
    """With FormatError, whatever is wrong."""
    with pytest.raises(FormatError):
        Change.from_json(bad)


@pytest.mark.parametrize(
    "change",
    [Change(2, Op.REGISTER, "a", content_of(1)), Change(2, Op.DROP, "b"), Change(2, Op.PIN, "b")],
)
def test_a_change_that_does_not_fit_changes_nothing(change: Change) -> None:
    """A copy stays at the version before."""
    catalogue = made(("register", "a", 1))
    with pytest.raises(LoragraphError):
        catalogue.apply([change])
    assert catalogue.snapshot() == GOOD
