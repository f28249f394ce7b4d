"""Chat messages to a prompt, by the model's own Jinja template.

Templates come with model files, so they are not trusted: see `sandbox` for what bounds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from loragraph.errors import FormatError, InvalidRequestError
from loragraph.vocab.sandbox import Budget, BudgetError, ChatEnvironment

MAX_SOURCE_CHARS = 1 << 16

_STRFTIME = re.compile(r"(?:[^%]|%-?[A-Za-z%])*")
_COMPILE_ERRORS = (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError)
_RENDER_ERRORS = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(RuntimeError, MemoryError, NameError),
)


class ChatTemplate:
    """A compiled chat template, rendered as Hugging Face's `apply_chat_template` does.

    `bos` and `eos` are the texts of these tokens, "" where the model has none. FormatError for a
    template that cannot be compiled. Rendering may happen in several threads at once.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._environment = ChatEnvironment()
        self._template = self._compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        timeout_s: float = 5.0,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; `variables` are further names that the template may read.

        InvalidRequestError where the template refuses the messages or cannot cope with them,
        FormatError where it needs more time, steps or text than a chat template may.
        """
        context = {
            **self._tokens,
            "documents": None,
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        try:
            with self._environment.within(Budget(timeout_s)) as budget:
                parts = []
                for part in self._template.generate(context):
                    budget.step()
                    parts.append(part)
                return "".join(parts)
        except BudgetError as exc:
            raise FormatError(str(exc), where="chat template") from exc
        except _RENDER_ERRORS as exc:
            reason = str(exc) or type(exc).__name__
            raise InvalidRequestError(f"chat template: {reason:.500}", param="messages") from exc

    def _compile(self, source: str) -> Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise FormatError(
                f"expected at most {MAX_SOURCE_CHARS} characters, got {len(source)}",
                where="chat template",
            )
        try:
            return self._environment.from_string(source)
        except TemplateSyntaxError as exc:
            raise FormatError(f"{exc.message}", where=f"chat template, line {exc.lineno}") from exc
        except (TemplateError, *_COMPILE_ERRORS) as exc:
            reason = str(exc) or type(exc).__name__
            raise FormatError(f"cannot be compiled: {reason:.200}", where="chat template") from exc


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    """The local time; widths are refused, since C's strftime pads to any of them."""
    if not isinstance(form, str) or len(form) > 256 or not _STRFTIME.fullmatch(form):
        raise TemplateError(f"strftime_now: expected a plain time format, got {form!r:.80}")
    return datetime.now().strftime(form)
