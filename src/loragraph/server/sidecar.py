"""Defaults that come with an adapter: `NAME.toml` beside its file, or the file's own metadata.

A request's fields always win; who may use an adapter is no default and always holds. A sidecar is
read once for a generation, so editing one counts from the next registration on, like new weights.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import threading
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from loragraph.engine.params import SamplingParams
from loragraph.engine.registry import AdapterHeader, Generation
from loragraph.errors import FormatError, InvalidRequestError, PermissionDeniedError
from loragraph.vocab.chat import ChatTemplate

MAX_SIDECAR_BYTES = 1 << 16
MAX_KEYS = 1024
MAX_KEY_CHARS = 512

_MAX_KEPT = 4096  # sidecars of generations; the least recently used is read again
# tomllib's time grows with the square of a dotted key's parts; possessive, so linear itself.
_LONG_KEY = re.compile(r"""(?>\.[ \t]*+(?>[\w-]++|"[^"\n]*+"|'[^'\n]*+')?+[ \t]*+){256}""")
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")
# What only a request can mean.
_NOT_SAMPLING = {"stop", "logit_bias", "logprobs", "prompt_logprobs"}
_SAMPLING = {one.name for one in fields(SamplingParams)} - _NOT_SAMPLING

CompileTemplate = Callable[[str], ChatTemplate]
"""Makes a template with the model's BOS and EOS; FormatError for one that is wrong."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an adapter, or a mix of several, gives a request that says nothing itself."""

    task_name: str = ""
    system_prompt: str | None = None  # of a chat that brings none
    prompt_prefix: str = ""  # in front of a text prompt, or of a chat's last user message
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    chat_template: ChatTemplate | None = None
    scale: float = 1.0  # where a request names the adapter without one
    keys: tuple[bytes, ...] | None = None  # SHA-256 of each that may use it; None: everyone

    def params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields for SamplingParams: the request's `given` ones, and the defaults of the rest."""
        own: dict[str, Any] = dict(self.sampling)
        if self.stop:
            own["stop"] = self.stop
        return own | dict(given)

    def text(self, prompt: str) -> str:
        """A text prompt with the prefix, unless it begins with it already."""
        return prompt if prompt.startswith(self.prompt_prefix) else self.prompt_prefix + prompt

    def prompts(self, prompt: Any) -> Any:
        """OpenAI's `prompt` with the prefix in each text that stands first; all else unchanged."""
        if isinstance(prompt, str):
            return self.text(prompt)
        if not isinstance(prompt, list) or not self.prompt_prefix:
            return prompt
        if any(isinstance(part, int) for part in prompt):  # one prompt, of ids and texts
            return [self.prompts(part) if i == 0 else part for i, part in enumerate(prompt)]
        return [self.prompts(part) for part in prompt]

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A chat with the system prompt, if it has none, and the prefix in its last user message.

        Messages are not changed but replaced; what is no well-formed message is left as it is.
        """
        out = list(messages)
        for i in range(len(out) - 1, -1, -1):
            content = out[i].get("content")
            if out[i].get("role") == "user":
                if isinstance(content, str) and self.prompt_prefix:
                    out[i] = {**out[i], "content": self.text(content)}
                break
        has_system = any(one.get("role") in ("system", "developer") for one in out)
        if self.system_prompt is not None and not has_system:
            out.insert(0, {"role": "system", "content": self.system_prompt})
        return out

    def allows(self, key: str | None) -> bool:
        """Whether the bearer of an API key (None: of none) may use it."""
        if self.keys is None:
            return True
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogatepass")).digest()
        equal = [hmac.compare_digest(digest, one) for one in self.keys]  # all, in equal time
        return any(equal)


NO_DEFAULTS = Defaults()
"""Of the base model."""


def merged(parts: Iterable[Defaults]) -> Defaults:
    """Defaults of a mix: for each field the first adapter's that has it, stop strings of all.

    `keys` and `scale` belong to each adapter alone and are left out.
    """
    own = list(parts)
    sampling: dict[str, Any] = {}
    for one in reversed(own):
        sampling |= one.sampling
    return Defaults(
        task_name=next((one.task_name for one in own if one.task_name), ""),
        system_prompt=next((d.system_prompt for d in own if d.system_prompt is not None), None),
        prompt_prefix=next((one.prompt_prefix for one in own if one.prompt_prefix), ""),
        stop=tuple(dict.fromkeys(text for one in own for text in one.stop)),
        sampling=sampling,
        chat_template=next((one.chat_template for one in own if one.chat_template), None),
    )


def sidecar_path(adapter: Path) -> Path:
    """Where the sidecar of an adapter's file or folder stands: NAME.toml beside it."""
    name = adapter.name if adapter.is_dir() else adapter.stem
    return adapter.parent / f"{name}.toml"


def read_defaults(path: Path | None, header: AdapterHeader, compile_: CompileTemplate) -> Defaults:
    """The defaults of an adapter at `path` (None: in memory).

    FormatError for a sidecar that is too large, no TOML, or says anything unknown or wrong.
    """
    document = {} if path is None else _document(sidecar_path(path))
    where = "" if path is None else str(sidecar_path(path))
    document.setdefault("task_name", header.task_name)
    document.setdefault("prompt_prefix", header.prompt_prefix)
    return _Reader(document, where).defaults(compile_)


class Sidecars:
    """The defaults of all generations; for any thread."""

    def __init__(self, compile_: CompileTemplate) -> None:
        self._compile = compile_
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Defaults] = OrderedDict()  # by generation number

    def of(self, generation: Generation) -> Defaults:
        """One adapter's defaults; FormatError as for read_defaults()."""
        with self._lock:
            found = self._kept.get(generation.number)
            if found is not None:
                self._kept.move_to_end(generation.number)
                return found
        read = read_defaults(generation.path, generation.header, self._compile)
        with self._lock:
            self._kept[generation.number] = read
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return read

    def check(self, path: Path) -> None:
        """FormatError where the sidecar of an adapter that is to be loaded is wrong."""
        read_defaults(path, AdapterHeader(0, 0, 0), self._compile)

    def for_mix(self, generations: Iterable[Generation], key: str | None) -> Defaults:
        """The defaults of a mix, for the bearer of `key`.

        PermissionDeniedError where one of its adapters is not for that key.
        """
        own = []
        for generation in generations:
            defaults = self.of(generation)
            if not defaults.allows(key):
                raise PermissionDeniedError(
                    f"the adapter '{generation.name}' is not for this API key", param="model"
                )
            own.append(defaults)
        return merged(own) if own else NO_DEFAULTS


class _Reader:
    """Takes a parsed document apart; every error names file and key."""

    def __init__(self, document: dict[str, Any], path: str) -> None:
        self._left = document
        self._path = path

    def defaults(self, compile_: CompileTemplate) -> Defaults:
        """All of it; what is left over is an error."""
        template = self._take("chat_template", str, None)
        out = Defaults(
            task_name=self._take("task_name", str, ""),
            system_prompt=self._take("system_prompt", str, None),
            prompt_prefix=self._take("prompt_prefix", str, ""),
            stop=self._stop(),
            sampling=self._sampling(),
            chat_template=None if template is None else self._template(template, compile_),
            scale=self._scale(),
            keys=self._keys(),
        )
        if self._left:
            known = [one.name for one in fields(Defaults)]
            raise self._bad(next(iter(self._left)), f"one of {', '.join(known)}", "an unknown key")
        return out

    def _take(self, name: str, kind: type, default: Any) -> Any:
        value = self._left.pop(name, default)
        if value is not default and not isinstance(value, kind):
            raise self._bad(name, _NAMES[kind], f"{value!r:.80}")
        if isinstance(value, str) and len(value) > MAX_SIDECAR_BYTES:  # of the file's metadata
            expected = f"at most {MAX_SIDECAR_BYTES} characters"
            raise self._bad(name, expected, str(len(value)))
        return value

    def _strings(self, name: str) -> list[str] | None:
        values = self._take(name, list, None)
        if values is not None and not all(isinstance(one, str) for one in values):
            raise self._bad(name, "an array of strings", f"{values!r:.80}")
        return values  # type: ignore[no-any-return]

    def _stop(self) -> tuple[str, ...]:
        stop = tuple(self._strings("stop") or ())
        self._check_param("stop", stop, "stop")
        return stop

    def _sampling(self) -> dict[str, Any]:
        table: dict[str, Any] = self._take("sampling", dict, {})
        for name in table:
            if name not in _SAMPLING:
                expected = f"one of {', '.join(sorted(_SAMPLING))}"
                raise self._bad(f"sampling.{name}", expected, "an unknown key")
            if isinstance(table[name], list):
                table[name] = tuple(table[name])
            self._check_param(name, table[name], f"sampling.{name}")
        return table

    def _check_param(self, name: str, value: object, where: str) -> None:
        try:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        except InvalidRequestError as error:
            raise FormatError(error.message, path=self._path, where=where) from error
        except (TypeError, OverflowError) as error:  # what no JSON request would get through
            raise FormatError(str(error), path=self._path, where=where) from error

    def _template(self, source: str, compile_: CompileTemplate) -> ChatTemplate:
        try:
            return compile_(source)
        except FormatError as error:
            raise FormatError(error.message, path=self._path, where="chat_template") from error

    def _scale(self) -> float:
        value = self._left.pop("scale", 1.0)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not abs(value) < 3.4e38:  # an integer may be too large for isfinite()
            raise self._bad("scale", "a finite number", f"{value!r:.80}")
        return float(value)

    def _keys(self) -> tuple[bytes, ...] | None:
        values = self._strings("keys")
        if values is None:
            return None
        if not 0 < len(values) <= MAX_KEYS:
            raise self._bad("keys", f"1 to {MAX_KEYS} keys", str(len(values)))
        return tuple(self._key(value) for value in values)

    def _key(self, value: str) -> bytes:
        """A key's SHA-256, given as it is or as such; an error does not repeat it."""
        hashed = _SHA256.fullmatch(value)
        if hashed:
            return bytes.fromhex(hashed[1])
        if not 0 < len(value) <= MAX_KEY_CHARS or value.startswith("sha256:"):
            expected = f"1 to {MAX_KEY_CHARS} characters, or sha256: and 64 hexadecimal digits"
            raise self._bad("keys", expected, f"{len(value)} characters")
        return hashlib.sha256(value.encode()).digest()

    def _bad(self, where: str, expected: str, got: str) -> FormatError:
        return FormatError(f"expected {expected}, got {got}", path=self._path, where=f"{where:.80}")


_NAMES: Mapping[type, str] = {str: "a string", list: "an array", dict: "a table"}


def _document(path: Path) -> dict[str, Any]:
    """A sidecar's tables, {} where there is no such file."""
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError) as error:  # a link to itself
        raise FormatError(str(error), path=path) from error
    if not real.is_relative_to(path.parent.resolve()):
        raise FormatError("expected a file, got a link that leads out of its folder", path=path)
    data = _bytes_of(real)
    if len(data) > MAX_SIDECAR_BYTES:
        raise FormatError(f"expected at most {MAX_SIDECAR_BYTES} bytes, got more", path=path)
    try:
        text = data.decode()
        if _LONG_KEY.search(text):
            raise ValueError("expected keys of at most 256 parts")
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FormatError(f"{error!s:.200}", path=path, where="TOML") from error


def _bytes_of(path: Path) -> bytes:
    """The beginning of a regular file, one byte more than a sidecar may have."""
    try:
        # not to wait for the writer of a pipe
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FormatError("expected a regular file", path=path)
            return file.read(MAX_SIDECAR_BYTES + 1)
    except OSError as error:
        raise FormatError(str(error), path=path) from error
