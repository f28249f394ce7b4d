"""Parts of GBNF texts: literals, lists of texts, and what expressions are made of.

No repeated part made here can be empty: the engine refuses such a rule as left recursion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from loragraph.engine.automaton import MAX_STACKS
from loragraph.errors import InvalidRequestError

_QUOTED = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def literal(text: str) -> str:
    """GBNF of a text itself."""
    return f'"{text.translate(_QUOTED)}"'


def rules_of_texts(texts: Iterable[str], root: str, *, param: str) -> dict[str, str]:
    """Rules by name, start rule `root`, of these texts and no others.

    Each text is an alternative of its own only from where it differs: what the alternatives of one
    rule begin with is unlike, so what was read leaves as many ways as characters may come next.
    InvalidRequestError, about `param`, where those are too many.
    """
    ordered = sorted(set(texts))
    rules: dict[str, str] = {}
    todo = [(root, 0, len(ordered), 0)]
    n_rules = 1
    while todo:
        name, begin, end, depth = todo.pop()  # of ordered[begin:end], beyond their first `depth`
        parts = []
        while begin < end:
            first = ordered[begin]
            stop = begin + 1
            if len(first) > depth:
                while stop < end and ordered[stop][depth] == first[depth]:
                    stop += 1
            if stop == begin + 1:
                parts.append(literal(first[depth:]))
            else:
                shared = _n_shared(first, ordered[stop - 1], depth)
                tail = f"{root}-{n_rules}"
                n_rules += 1
                parts.append(f"{literal(first[depth:shared])} {tail}")
                todo.append((tail, begin, stop, shared))
            begin = stop
        if len(parts) > MAX_STACKS:
            raise InvalidRequestError(
                f"{param}: expected texts with at most {MAX_STACKS} unlike characters where they "
                f"begin to differ, got {len(parts)}",
                param=param,
            )
        rules[name] = " | ".join(parts)
    return rules


def _n_shared(one: str, other: str, start: int) -> int:
    """How many characters both begin with, `start` of which are known."""
    most = min(len(one), len(other))
    return next((at for at in range(start, most) if one[at] != other[at]), most)


class Gbnf(NamedTuple):
    """A piece of GBNF and what it is: 0 one symbol, 1 several or a repeated one, 2 alternatives.

    The empty piece stands for the empty text.
    """

    text: str
    level: int = 1

    def at(self, level: int) -> str:
        """The piece where at most `level` may stand."""
        if not self.text:
            return '""'
        return f"({self.text})" if self.level > level else self.text


@dataclass(frozen=True)
class Part:
    """A part of an expression.

    `loop` never matches the empty text, and `loop*` is the same as `whole*` (the star normal form
    of Brueggemann-Klein, which is no longer than the expression); None where only the empty text
    matches.
    """

    whole: Gbnf
    loop: Gbnf | None
    nullable: bool


NOTHING = Part(Gbnf(""), None, True)
"""The empty text."""


def symbol(text: str) -> Part:
    """A part that is one symbol of GBNF, never empty."""
    return Part(Gbnf(text, 0), Gbnf(text, 0), False)


def joined(one: Part, other: Part) -> Part:
    """One part after the other."""
    if one == NOTHING or other == NOTHING:
        return other if one == NOTHING else one
    whole = Gbnf(f"{one.whole.at(1)} {other.whole.at(1)}", 1)
    if one.nullable and other.nullable:  # (one other)* is (one | other)*
        return Part(whole, _either(one.loop, other.loop), True)
    return Part(whole, whole, False)


def either(one: Part, other: Part) -> Part:
    """One of two parts."""
    if one == other:
        return one
    whole = Gbnf(f"{one.whole.at(2)} | {other.whole.at(2)}", 2)
    return Part(whole, _either(one.loop, other.loop), one.nullable or other.nullable)


def _either(one: Gbnf | None, other: Gbnf | None) -> Gbnf | None:
    if one is None or other is None or one == other:
        return one or other
    return Gbnf(f"{one.at(2)} | {other.at(2)}", 2)


def repeated(part: Part, low: int, high: int | None) -> Part:
    """`low` to `high` times a part; None: any number of times."""
    if part.loop is None or high == 0:
        return NOTHING
    if (low, high) == (1, 1):
        return part
    if part.nullable:  # as often as not
        low = 0
    if high is None and low == 0:
        return Part(Gbnf(f"{part.loop.at(0)}*"), part.loop, True)
    if high == 1 and part.nullable:
        return part
    if high is None:
        mark = "+" if low == 1 else f"{{{low},}}"
    else:
        mark = "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"
    whole = Gbnf(f"{part.whole.at(0)}{mark}")
    return Part(whole, part.loop if low == 0 else whole, low == 0)
