"""What routing needs to know of a request, read from its body before anybody serves it. Pure.

A hint decides where a request goes and how old a copy of the catalogue may be that serves it, and
nothing else: what a request means is the business of the replica's routes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_json

from loragraph.cluster.catalogue import Catalogue
from loragraph.cluster.fleet import AdapterKey
from loragraph.engine.registry import name_problem

MAX_NAMES = 256
_PREFIX_CHARS = 1024
_N_MESSAGES = 2  # the system's and the first of the user, which all turns of a chat share


@dataclass(frozen=True, slots=True)
class Hint:
    """Travels with a request to the router and to the replica."""

    request_id: str
    version: int = 0  # of the catalogue, at which it came
    adapters: tuple[AdapterKey, ...] = ()  # generation 0: not in the catalogue, perhaps a file
    prefix: str = ""  # fingerprint of how its prompt begins, under these adapters
    sticky: str = ""  # requests with the same word go to the same replica
    avoid: tuple[str, ...] = ()  # replicas that failed it
    prefer: str = ""  # the replica that its client asks for

    def without(self, replica: str) -> Hint:
        """For the next try."""
        return replace(self, avoid=(*self.avoid, replica))


def hint_of(request_id: str, body: Any, catalogue: Catalogue, base_names: Iterable[str]) -> Hint:
    """The hint of a request's parsed body, which may be anything."""
    if not isinstance(body, Mapping):
        return Hint(request_id, catalogue.version)
    keys = []
    for name in wanted_names(body, catalogue, frozenset(base_names))[:MAX_NAMES]:
        entry = catalogue.entries.get(name)
        keys.append(AdapterKey(name, 0 if entry is None else entry.generation))
    adapters = tuple(sorted(set(keys)))
    return Hint(request_id, catalogue.version, adapters, prefix_of(body, adapters))


def wanted_names(
    body: Mapping[str, Any], catalogue: Catalogue, base_names: frozenset[str]
) -> list[str]:
    """Names of the adapters of a request, those at scale 0 left out; the rules of server/mixes."""
    loaded = body.get("lora_name")
    if isinstance(loaded, str):  # of the routes that change adapters: where it will be used
        return [loaded] if name_problem(loaded) is None else []
    for field in ("lora", "adapters"):
        if body.get(field) is not None:
            return [name for name in _scaled(body[field], catalogue) if name_problem(name) is None]
    path = body.get("lora_path")  # SGLang's: a name, or one for each prompt
    if path is not None:
        names = _scaled([path] if isinstance(path, str) else path, catalogue)
        return [name for name in dict.fromkeys(names) if name_problem(name) is None]
    model = body.get("model")
    if isinstance(model, str) and model and model not in base_names:
        base, colon, rest = model.partition(":")
        if model not in catalogue.entries and colon and base in base_names:
            model = rest
        return [model] if name_problem(model) is None else []
    return [name for name, scale in (catalogue.default_mix or {}).items() if scale]


def prefix_of(body: Mapping[str, Any], adapters: tuple[AdapterKey, ...]) -> str:
    """A fingerprint of a prompt's beginning; "" for none.

    Of a chat its first messages, so that its later turns go where the earlier ones were.
    """
    messages = body.get("messages")
    if isinstance(messages, list):
        begin: Any = messages[:_N_MESSAGES]
    else:
        begin = body.get("prompt", body.get("input_prefix", body.get("input")))
        if isinstance(begin, list | str):
            begin = begin[:_PREFIX_CHARS]
    if not begin:
        return ""
    salt = body.get("cache_salt")
    data = [list(map(list, adapters)), salt if isinstance(salt, str) else "", begin]
    try:
        encoded = to_json(data)
    except ValueError:  # half of a surrogate pair
        encoded = repr(data).encode("utf-8", "replace")
    return hashlib.blake2b(encoded[: 4 * _PREFIX_CHARS], digest_size=8).hexdigest()


def _scaled(value: Any, catalogue: Catalogue) -> list[str]:
    """Names in one of the forms of `lora` and `adapters`; what is none is left out."""
    if isinstance(value, Mapping):
        return [name for name, scale in value.items() if scale]
    found: list[str] = []
    for one in value if isinstance(value, list) else ():
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, Mapping) and one.get("scale"):
            number = one.get("id")
            known = catalogue.name_of(number) if isinstance(number, int) else None
            name = one.get("name", known)
            if isinstance(name, str):
                found.append(name)
    return found
