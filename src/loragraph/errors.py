"""Every error that a user of loragraph can cause.

LoragraphError
├─ ConfigError(ValueError)           a flag or an argument                         [field]
├─ FormatError(ValueError)           a file is not what it says                    [path, where]
│  ├─ GGUFError                        magic, version, truncated, overlap, bad type
│  └─ AdapterFormatError               missing half, bad shape, bad metadata
├─ UnsupportedError                  well-formed, but not implemented              [what]
├─ AdapterMismatchError(ValueError)  the adapter does not fit this base            [adapter, tensor]
├─ RequestError(ValueError)          the caller of a generation is wrong           [status, param]
│  ├─ InvalidRequestError              400
│  ├─ ContextLengthError               400 context_length_exceeded
│  ├─ PermissionDeniedError            403 permission_denied
│  └─ ModelNotFoundError               404 model_not_found
├─ LifecycleError(RuntimeError)      use after close, close while attached, two threads
├─ CapacityError                     no cells, slots or places left                [status]
│  ├─ MixTooLargeError                 400: more adapters than a token or the pool can hold
│  └─ OverloadedError                  429: too many requests wait
├─ DeadlineError                     a request's time was over                     [status, result]
├─ AdapterChangedError               a file is no longer what was registered       [status]
├─ StaleCatalogueError               a copy of the catalogue is behind a request   [status]
├─ SourceError                       an adapter could not be fetched               [status, source]
├─ OutputError                       a file could not be written: full disk, no permission
└─ BackendError                      ggml failed, is missing or is of another version

A message says expected, got, where, and then a hint.
"""

from __future__ import annotations

from os import PathLike, fspath


class LoragraphError(Exception):
    """Base of all errors that a user can cause.

    `hint` is one sentence on what to do; `str(error)` contains it in parentheses.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} (hint: {hint})" if hint else message)

    def add_place(self, place: str) -> None:
        """Puts a place in front of a message that does not name it yet."""
        if place not in self.message:
            self.message = f"{place}: {self.message}"
            self.args = (f"{self.message} (hint: {self.hint})" if self.hint else self.message,)


class ConfigError(LoragraphError, ValueError):
    """A flag or an argument has a value that cannot be used."""

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        self.field = field
        super().__init__(f"{field}: {message}" if field else message, hint=hint)


class FormatError(LoragraphError, ValueError):
    """A file is not what it says it is; `where` names the place in it."""

    def __init__(
        self, message: str, *, path: str | PathLike[str] = "", where: str = "", hint: str = ""
    ) -> None:
        self.path = fspath(path)
        self.where = where
        place = ": ".join(part for part in (self.path, where) if part)
        super().__init__(f"{place}: {message}" if place else message, hint=hint)


class GGUFError(FormatError):
    """The container itself is damaged: magic, version, bounds, types.

    Unless told otherwise it hints at what helps against any damage.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] = "",
        where: str = "",
        hint: str = "download or convert the file again",
    ) -> None:
        super().__init__(message, path=path, where=where, hint=hint)


class AdapterFormatError(FormatError):
    """A readable GGUF file that is no well-formed LoRA adapter."""


class UnsupportedError(LoragraphError):
    """Well-formed input that loragraph has no implementation for."""

    def __init__(self, message: str, *, what: str = "", hint: str = "") -> None:
        self.what = what
        super().__init__(message, hint=hint)


class AdapterMismatchError(LoragraphError, ValueError):
    """A well-formed adapter that does not fit the given base model."""

    def __init__(
        self, message: str, *, adapter: str = "", tensor: str = "", hint: str = ""
    ) -> None:
        self.adapter = adapter
        self.tensor = tensor
        super().__init__(f"{adapter}: {message}" if adapter else message, hint=hint)


class RequestError(LoragraphError, ValueError):
    """The caller asked for something that cannot be done; `status` is the HTTP status."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        self.param = param
        super().__init__(message, hint=hint)


class InvalidRequestError(RequestError):
    """A field of a request has a wrong type or value."""


class ContextLengthError(RequestError):
    """The tokens do not fit into the context; how many there are, and how many it has, if known."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        n_prompt_tokens: int | None = None,
        n_ctx: int | None = None,
        param: str = "",
        hint: str = "",
    ) -> None:
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx
        super().__init__(message, param=param, hint=hint)


class PermissionDeniedError(RequestError):
    """The caller may not use what the request names."""

    status = 403
    code = "permission_denied"


class ModelNotFoundError(RequestError):
    """No model or adapter has the name asked for."""

    status = 404
    code = "model_not_found"


class LifecycleError(LoragraphError, RuntimeError):
    """An object was used after its close, closed while in use, or used by two threads at once."""


class CapacityError(LoragraphError):
    """No cells, slots or queue places are left."""

    status = 503


class MixTooLargeError(CapacityError):
    """More adapters, or larger ones, than a token or the pool can ever hold: waiting is no use."""

    status = 400


class OverloadedError(CapacityError):
    """Too many requests wait already; the caller may try again later."""

    status = 429


class DeadlineError(LoragraphError):
    """A request's time was over before it ended; `result` is what there was by then, if anything.

    Which adapters it used and what it generated stands there.
    """

    status = 504

    def __init__(self, message: str, *, result: object = None, hint: str = "") -> None:
        self.result = result
        super().__init__(message, hint=hint)


class AdapterChangedError(LoragraphError):
    """An adapter was to be loaded again, but its file has other content than the first time."""

    status = 409


class StaleCatalogueError(LoragraphError):
    """A replica's copy of the catalogue is older than what it is asked for: it has to refresh."""

    status = 503


class SourceError(LoragraphError):
    """An adapter could not be fetched, or is not what was expected.

    `source` is where from, without credentials.
    """

    status = 502

    def __init__(self, message: str, *, source: str = "", hint: str = "") -> None:
        self.source = source
        super().__init__(f"{source}: {message}" if source else message, hint=hint)


class OutputError(LoragraphError):
    """A file could not be written; what stood under its name stands there still."""

    status = 500


class BackendError(LoragraphError):
    """The native library is missing, of another version, or reported a failure."""

    status = 500
