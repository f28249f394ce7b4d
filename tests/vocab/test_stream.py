from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragraph.errors import InvalidRequestError
from loragraph.vocab.stream import TextStream


def naive(data: bytes, stops: list[str]) -> tuple[str, str | None]:
    """The twin: decode everything, cut at the stop string that is complete first."""
    text = data.decode("utf-8", "replace")
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def streamed(parts: list[bytes], stops: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(stops)
    return [*map(stream.feed, parts), stream.flush()], stream


_BYTES = st.lists(
    st.one_of(
        st.text("abc", max_size=4).map(str.encode),
        st.sampled_from(
            [b"\xf0\x9f", b"\xa6\x99", b"\xc3", b"\xa9", b"\xff", b"\xe4\xb8\xad", b""]
        ),
        st.binary(max_size=4),
    ),
    max_size=12,
)
_STOPS = st.lists(
    st.one_of(
        st.text("abc", min_size=1, max_size=5), st.sampled_from(["é", "中", "\ufffd", "🦙a"])
    ),
    max_size=4,
)


@given(parts=_BYTES, stops=_STOPS)
def test_stream_equals_joining_everything_first(parts: list[bytes], stops: list[str]) -> None:
    """However the bytes are cut into tokens, the text is the naive twin's."""
    texts, stream = streamed(parts, stops)
    text, stop = naive(b"".join(parts), stops)
    assert "".join(texts) == text
    assert stream.stop_string == stop
    assert stream.stopped == (stop is not None)


@given(parts=_BYTES, stops=_STOPS)
def test_nothing_is_held_longer_than_needed(parts: list[bytes], stops: list[str]) -> None:
    """After each token everything is out but a possible beginning of a stop string."""
    stream = TextStream(stops)
    given_out = ""
    for n in range(len(parts)):
        given_out += stream.feed(parts[n])
        if stream.stopped:
            return
        whole = _decidable(b"".join(parts[: n + 1]))
        held = whole.removeprefix(given_out)
        assert not held or any(stop.startswith(held) for stop in stops)


def _decidable(data: bytes) -> str:
    """The text of the data without what later bytes could still make a character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def test_characters_are_never_split() -> None:
    """The bytes of one character come out together, in the piece that completes it."""
    texts, _ = streamed([b"a\xf0", b"\x9f\xa6", b"\x99b", b"\xc3"], [])
    assert texts == ["a", "", "🦙b", "", "\ufffd"]


def test_overlapping_stops() -> None:
    """The stop string that is complete first wins; of two at one place, the longer one."""
    assert streamed([b"xabcd"], ["abcd", "bc"])[0] == ["xa", ""]
    assert streamed([b"xab", b"c"], ["abc", "bc"])[0] == ["x", "", ""]


def test_text_after_a_stop_is_dropped() -> None:
    """Nothing comes after a stop string, and what looked like one comes out at the end."""
    texts, stream = streamed([b"one<e", b"nd>two", b"three"], ["<end>"])
    assert texts == ["one", "", "", ""]
    assert stream.stop_string == "<end>"
    assert streamed([b"one<e"], ["<end>"])[0] == ["one", "<e"]


def test_empty_stop_is_refused() -> None:
    """An empty stop string would end every text at once."""
    with pytest.raises(InvalidRequestError, match="non-empty"):
        TextStream(["a", ""])


def test_a_stop_string_too_early_is_text() -> None:
    """Only one that is completed later counts, and it may overlap one that did not."""
    stream = TextStream(["aba"])
    assert stream.feed(b"xaba", may_stop=False) == "xab"
    assert not stream.stopped
    assert stream.feed(b"b", may_stop=False) == ""
    assert stream.feed(b"a") == ""
    assert stream.stop_string == "aba"
    plain = TextStream()
    assert plain.feed(b"abc", may_stop=False) + plain.flush() == "abc"


def test_a_stop_string_is_kept_where_it_is_wanted() -> None:
    """It ends the text, and so do the bytes of a token that ends it."""
    stream = TextStream(["bc"], keep_stop=True)

    assert [stream.feed(b"ab"), stream.feed(b"cd"), stream.end(b"e")] == ["a", "bc", "e"]
    assert stream.stop_string == "bc"
    assert TextStream().end(b"e") == ""
