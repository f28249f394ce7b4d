"""Bytes of tokens to pieces of text: whole characters only, and nothing past a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from loragraph.errors import InvalidRequestError


class TextStream:
    """Turns the bytes of successive tokens into text that may be shown at once.

    Invalid UTF-8 becomes U+FFFD, an unfinished character waits for its rest. Text that may be the
    beginning of a stop string is held back; the first stop string to be complete (the longest, if
    several are at the same character) ends the stream: it and what follows are not given out; with
    `keep_stop` it is.
    """

    def __init__(self, stop: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        if not all(stop):
            raise InvalidRequestError("stop: expected non-empty strings, got ''", param="stop")
        self.stop_string: str | None = None
        self._keep_stop = keep_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # the longest first: of those complete at the same character it is met first
        self._matchers = [_Matcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._held = ""

    @property
    def stopped(self) -> bool:
        """True once a stop string was met."""
        return self.stop_string is not None

    def feed(self, data: bytes, *, may_stop: bool = True) -> str:
        """The text that `data` makes available; "" after a stop string.

        Without `may_stop` a stop string that `data` completes is text like any other.
        """
        if self.stopped:
            return ""
        text = self._decoder.decode(data)
        return self._advance(text) if may_stop else self._pass(text)

    def flush(self) -> str:
        """The end of the text: what was held back, an unfinished character as U+FFFD."""
        if self.stopped:
            return ""
        text = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def end(self, data: bytes) -> str:
        """The end of a text that a token with these bytes ends, which are kept as a string is."""
        text = self.flush()
        return text + data.decode("utf-8", "replace") if self._keep_stop else text

    def _advance(self, text: str) -> str:
        if not self._matchers:
            return text
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            for matcher in self._matchers:
                if matcher.step(text[end]):
                    self.stop_string = matcher.text
                    self._held = ""
                    return text[: end + 1 - (0 if self._keep_stop else len(matcher.text))]
        return self._hold_back(text)

    def _pass(self, text: str) -> str:
        for char in text if self._matchers else "":
            for matcher in self._matchers:
                if matcher.step(char):
                    matcher.go_on()
        return self._hold_back(self._held + text)

    def _hold_back(self, text: str) -> str:
        """All of `text` that is no beginning of a stop string."""
        cut = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[cut:]
        return text[:cut]


class _Matcher:
    """Knuth, Morris and Pratt's search for one string, a character at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest beginning of `text` that the input ends with
        self._fallback = [0]  # per length: the longest proper beginning that it also ends with
        length = 0
        for char in text[1:]:
            while length and text[length] != char:
                length = self._fallback[length - 1]
            length += text[length] == char
            self._fallback.append(length)

    def step(self, char: str) -> bool:
        """True where the input, with `char`, ends with the whole string."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == char
        return self.matched == len(self.text)

    def go_on(self) -> None:
        """After a match that does not count: the next may overlap it."""
        self.matched = self._fallback[-1]
