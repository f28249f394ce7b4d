"""Jinja for untrusted templates: no way out (jinja2's sandbox) and no way to exhaust the machine.

Every loop step, call, filter, operator and piece of output passes through one function that counts
steps, looks at the clock and bounds the size of what was made. So each single operation is small,
and the sum of them is stopped. What cannot be bounded (string formatting with widths, filters that
pad or fill) does not exist here.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_TEXT = 1 << 22  # characters of one text, and of all output together
MAX_VALUES = 200_000  # values inside one container, counted as often as they are reached
_MAX_DEPTH = 200
_MAX_BITS = 4096
_MAX_PRECISION = 300
_MAX_INDENT = 32

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("groupby", "indent", "int", "items", "last", "length", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr"),
    *("sort", "string", "sum", "title", "trim", "unique", "upper", "wordcount"),
)
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")
_GROWING_FILTERS = ("replace", "string", "sort", "unique", "dictsort", "groupby", "sum")
_WIDE_FORMAT = re.compile(r"%[^A-Za-z%]*(?:\d{4}|\*)")


class BudgetError(SecurityError):
    """The template did, or was about to do, more than a chat template may."""


class Budget:
    """What one rendering may use."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._steps = 0
        self._chars = 0

    def step(self, n: int = 1) -> None:
        """Counts `n` steps; BudgetError when steps or time are used up."""
        self._steps += n
        if self._steps > MAX_STEPS:
            raise BudgetError(f"expected at most {MAX_STEPS} steps, got more")
        if time.monotonic() > self._deadline_s:
            raise BudgetError(f"expected at most {self._timeout_s:g} s, got more")

    def output(self, text: str) -> str:
        """Counts output, that of macros and blocks too."""
        self._chars += len(text)
        if self._chars > MAX_TEXT:
            raise BudgetError(f"expected at most {MAX_TEXT} characters of output, got more")
        return text

    def checked(self, value: Any) -> Any:
        """`value`, unless it is too large; containers are counted through and through."""
        if isinstance(value, str):
            _check_size("characters in a text", len(value), MAX_TEXT)
        elif isinstance(value, list | tuple | dict):
            self.step(self._count(value) // 16)
        return value

    def text(self, value: Any) -> str:
        """`value` as text, its size known before the text is made."""
        if isinstance(value, Namespace):
            raise BudgetError("a namespace cannot be printed")
        return str(self.checked(value))

    def _count(self, value: Any) -> int:
        """Number of values reached from `value`, a shared one as often as it is reached."""
        n = chars = 0
        todo: list[tuple[Any, int]] = [(value, 0)]
        while todo:
            item, depth = todo.pop()
            n += 1
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, Namespace):
                raise BudgetError("a namespace cannot be put into a container")
            elif isinstance(item, dict):
                _check_size("nested containers", depth, _MAX_DEPTH)
                todo += [(part, depth + 1) for pair in item.items() for part in pair]
            elif isinstance(item, list | tuple):
                _check_size("nested containers", depth, _MAX_DEPTH)
                todo += [(part, depth + 1) for part in item]
            if n + len(todo) > MAX_VALUES or chars > MAX_TEXT:
                raise BudgetError(
                    f"expected at most {MAX_VALUES} values and {MAX_TEXT} characters, got more"
                )
        return n


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with budgets, and with what Hugging Face's templates expect."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=_finalize,
            optimized=False,  # folding constants would run code before there is a budget
        )
        self._local = threading.local()
        self.filters = {name: _guarded(self, name, FILTERS[name]) for name in _FILTERS}
        self.filters |= {
            "join": self._join,
            "tojson": self._tojson,
            "_concat": self._concat,
            "_each": self._each,
            "_checked": self._checked,
        }
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: self.budget.checked(dict(*args, **kwargs)),
            "namespace": Namespace,
        }

    @contextmanager
    def within(self, budget: Budget) -> Iterator[Budget]:
        """Renderings of this thread inside the block use `budget`."""
        self._local.budget = budget
        try:
            yield budget
        finally:
            del self._local.budget

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering."""
        budget: Budget | None = getattr(self._local, "budget", None)
        if budget is None:
            raise BudgetError("nothing is computed outside of a rendering")
        return budget

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls with a step counted, refusing string methods whose result is not bounded."""
        __self.budget.step()
        _check_method(__obj, args)
        return __self.budget.checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators with the size of the result known before it is computed."""
        self.budget.step()
        _check_operands(self.budget, operator, left, right)
        return self.budget.checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format pads to any width, so there is none."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format is not available in chat templates")
        return None

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    def _checked(self, value: Any) -> Any:
        return self.budget.checked(value)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.step()
            yield value

    def _concat(self, parts: Iterable[Any]) -> str:
        texts = [self.budget.text(part) for part in parts]
        self.budget.step()
        _check_size("characters in a text", sum(map(len, texts)), MAX_TEXT)
        return "".join(texts)

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = [self.getitem(value, attribute) for value in self._each(values)]
        texts: list[str] = []
        n_chars = 0
        for value in self._each(values):
            texts.append(self.budget.text(value))
            n_chars += len(texts[-1]) + len(d)
            _check_size("characters in a text", n_chars, MAX_TEXT)
        return str(d).join(texts)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as Hugging Face's templates expect it: no HTML escapes, no ASCII escapes."""
        self.budget.step()
        if indent is not None:
            _check_size(
                "spaces of indent", len(indent) if isinstance(indent, str) else indent, _MAX_INDENT
            )
        if separators is not None:
            _check_size("characters in separators", sum(map(len, separators)), _MAX_INDENT)
        self.budget.checked(value)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        return str(self.budget.checked(text))


class _Instrument(NodeTransformer):
    """Sends through the budget what jinja2's own hooks do not see."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_each")
        # a recursive loop's inner rounds do not pass by `iter`
        node.body.insert(0, nodes.Output([_filter(nodes.List([], lineno=node.lineno), "_concat")]))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """Literal text as a constant expression, so that it passes `_finalize` each time."""
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._container(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return node if node.ctx == "store" else self._container(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._container(
            node, [part for pair in node.items for part in (pair.key, pair.value)]
        )

    def _container(self, node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Node:
        constant = all(isinstance(item, nodes.Const) for item in items)
        self.generic_visit(node)
        return node if constant else _filter(node, "_checked")


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's words for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, ChatEnvironment)
    budget = environment.budget
    budget.step()
    return budget.output(budget.text(value))


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _guarded(
    environment: ChatEnvironment, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A filter that counts, with bounded arguments and a bounded result."""

    @functools.wraps(function)  # copies jinja2's mark for the first argument, too
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = environment.budget
        budget.step()
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if name in ("indent", "round"):
            limit = _MAX_INDENT if name == "indent" else _MAX_PRECISION
            for argument in (*values[1:], *kwargs.values()):
                size = len(argument) if isinstance(argument, str) else argument
                _check_size("as an argument", size, limit)
        if name in _GROWING_FILTERS:
            for value in values:
                budget.checked(value)
        if name == "replace":
            _check_replacement(*values[:3], **kwargs)
        elif name == "indent":
            _check_replacement(values[0], "\n", " " * _MAX_INDENT)
        result = function(*args, **kwargs)
        if isinstance(result, GeneratorType):
            result = _collected(budget, result)
        elif isinstance(result, str):
            budget.checked(result)
        elif isinstance(result, list | tuple | dict):
            _check_size("values in a container", len(result), MAX_VALUES)
        return result

    return guarded


def _collected(budget: Budget, values: Iterable[Any]) -> list[Any]:
    """A list of a generator's values, whose texts together are bounded."""
    result: list[Any] = []
    n_chars = n_values = 0
    for value in values:
        budget.step()
        result.append(value)
        n_chars += len(value) if isinstance(value, str) else 0
        n_values += len(value) if isinstance(value, list | tuple | dict) else 1
        _check_size("characters in a list", n_chars, MAX_TEXT)
        _check_size("values in a list", n_values, MAX_VALUES)
    return result


def _check_method(function: Any, args: tuple[Any, ...]) -> None:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, bytes | bytearray | int | float):
        raise SecurityError(f"methods of {type(owner).__name__} are not available")
    if not isinstance(owner, str):
        return
    name = getattr(function, "__name__", "")
    if name in _PADDING_METHODS:
        raise SecurityError(f"str.{name} is not available in chat templates")
    if name == "replace":
        _check_replacement(owner, *args[:2])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        n_chars = sum(len(part) for part in args[0] if isinstance(part, str))
        _check_size("characters in a text", n_chars + len(owner) * len(args[0]), MAX_TEXT)
    elif name == "join":
        raise SecurityError("str.join: expected a list or tuple")


def _check_replacement(text: Any = "", old: Any = "", new: Any = "", **_kwargs: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    size = len(text) + text.count(old) * len(new)
    _check_size("characters in a text", size, MAX_TEXT)


def _check_operands(budget: Budget, operator: str, left: Any, right: Any) -> None:
    sequences = (str, list, tuple)
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, sequences) and isinstance(other, int):
                _check_size("values in a product", len(one) * other, MAX_VALUES)
        if isinstance(left, int) and isinstance(right, int):
            _check_size("bits in a number", left.bit_length() + right.bit_length(), _MAX_BITS)
    elif operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        limit = MAX_TEXT if isinstance(left, str) else MAX_VALUES
        _check_size("values in a sum", len(left) + len(right), limit)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_size("bits in a number", left.bit_length() * right, _MAX_BITS)
    elif operator == "%" and isinstance(left, str):
        if _WIDE_FORMAT.search(left):
            raise BudgetError("expected a format without wide fields")
        n_fields = left.count("%")
        budget.checked(right if isinstance(right, tuple | dict) else (right,))
        if isinstance(right, Mapping):
            _check_size("fields in a format", n_fields, _MAX_INDENT)


def _check_size(what: str, size: Any, limit: int) -> None:
    if isinstance(size, int) and size > limit:
        raise BudgetError(f"expected at most {limit} {what}, got {size}")
