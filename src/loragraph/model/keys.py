"""The keys `<arch>.*` of a GGUF header, each read with its bounds: what is absurd is refused."""

from __future__ import annotations

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile

MAX_SIZE = 1 << 24
"""No embedding, head or feed-forward width comes near."""

_MAX_REAL = 3e38  # about the largest f32


class Keys:
    """The numbers of one architecture; names are given without `<arch>.`."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.arch = file.string("general.architecture")

    def __contains__(self, name: str) -> bool:
        return self.full(name) in self.file

    def full(self, name: str) -> str:
        """The key as it stands in the file."""
        return f"{self.arch}.{name}"

    def integer(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1
    ) -> int:
        """An integer in [low, high]."""
        return self.file.integer(self.full(name), default, low=low, high=high)

    def string(self, name: str, default: str | None = None) -> str:
        """A string."""
        return self.file.string(self.full(name), default)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """A bool."""
        return self.file.boolean(self.full(name), default)

    def real(
        self,
        name: str,
        default: float | None = None,
        *,
        low: float = -_MAX_REAL,
        high: float = _MAX_REAL,
    ) -> float:
        """A number in [low, high], which ggml takes as f32."""
        value = self.file.real(self.full(name), default)
        if not low <= value <= high:
            raise self.error(f"expected a value from {low:g} to {high:g}, got {value:g}", name)
        return value

    def factor(self, name: str) -> float:
        """An optional factor, 1 where the key is missing or 0, as in llama.cpp."""
        return self.real(name, default=0.0) or 1.0

    def per_layer(
        self, name: str, n_layer: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A key that holds one number for all layers or an array with one number a layer."""
        key = self.full(name)
        if key not in self.file and default is not None:
            return default
        if not self.is_array(name):
            return (self.integer(name, low=1, high=MAX_SIZE),) * n_layer
        values = self.file.numbers(key)
        if len(values) != n_layer or values.dtype.kind not in "iu":
            raise self.error(
                f"expected {n_layer} integers, one a layer, got {self.file.type_of(key)} "
                f"of length {len(values)}",
                name,
            )
        numbers = tuple(int(value) for value in values)
        if not all(1 <= number <= MAX_SIZE for number in numbers):
            raise self.error(
                f"expected values from 1 to {MAX_SIZE}, got {min(numbers)} to {max(numbers)}", name
            )
        return numbers

    def flags(self, name: str, n_layer: int) -> tuple[bool, ...]:
        """An array with one bool a layer, at times written as integers."""
        key = self.full(name)
        values = self.file.numbers(key)
        if len(values) != n_layer or values.dtype.kind not in "biu":
            raise self.error(
                f"expected {n_layer} bools, one a layer, got {self.file.type_of(key)} "
                f"of length {len(values)}",
                name,
            )
        return tuple(bool(value) for value in values)

    def is_array(self, name: str) -> bool:
        """Whether the key is there and holds an array."""
        return self.file.type_of(self.full(name)).startswith("array")

    def error(self, message: str, name: str) -> GGUFError:
        """What is wrong with a key."""
        return GGUFError(message, path=self.file.path, where=self.full(name))

    def unsupported(self, message: str, what: str) -> UnsupportedError:
        """What is well-formed and not implemented."""
        return UnsupportedError(f"{self.file.path}: {message}", what=what)
