"""Detokenisation and stop strings against a plain reference that sees all the bytes at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.text import TextStream

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"aba",
    b"\n",
    b"",
    b"x",
    "é".encode(),
    "🙂".encode()[:2],
    "🙂".encode()[2:],
    b"\xff",
    "字".encode(),
]


def run(tokens: list[int], stop: list[str], **options: object) -> tuple[list[str], TextStream]:
    stream = TextStream(PIECES.__getitem__, stop, **options)  # type: ignore[arg-type]
    deltas = []
    for token in tokens:
        deltas.append(stream.push(token))
        if stream.stop_reason is not None:
            return deltas, stream
    deltas.append(stream.finish())
    return deltas, stream


def reference(tokens: list[int], stop: list[str], min_tokens: int, include_stop: bool) -> tuple[str, str | None]:
    """Grow the text a token at a time; of all stop strings that end in the new characters, take the first to end."""
    raw, shown = b"", ""
    for count, token in enumerate(tokens, 1):
        raw += PIECES[token]
        text = complete_characters(raw)
        if count >= min_tokens:
            ends = range(len(shown) + 1, len(text) + 1)
            for end in ends:
                matched = [s for s in stop if text[:end].endswith(s)]
                if matched:
                    longest = max(matched, key=len)
                    return text[: end if include_stop else end - len(longest)], longest
        shown = text
    whole = raw.decode("utf-8", errors="replace")
    tail_end = [(e, s) for e in range(len(shown) + 1, len(whole) + 1) for s in stop if whole[:e].endswith(s)]
    if tail_end and len(tokens) >= min_tokens:
        end = min(e for e, _ in tail_end)
        longest = max((s for e, s in tail_end if e == end), key=len)
        return whole[: end if include_stop else end - len(longest)], longest
    return whole, None


def complete_characters(raw: bytes) -> str:
    """Decode, leaving out an unfinished character at the end."""
    for n in (3, 2, 1):
        if n <= len(raw) and is_unfinished(raw[-n:]):
            return raw[:-n].decode("utf-8", errors="replace")
    return raw.decode("utf-8", errors="replace")


def is_unfinished(tail: bytes) -> bool:
    """Whether these bytes are the beginning of a character, and nothing more."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
stops = st.lists(st.sampled_from(["a", "ab", "aba", "b", "bab", "\n\n", "xa", "é", "🙂a", "字", "abab"]), max_size=3)


@given(tokens, stops, st.integers(0, 6), st.booleans())
def test_deltas_join_to_the_reference_text(tokens: list[int], stop: list[str], min_tokens: int, include: bool) -> None:
    deltas, stream = run(tokens, stop, min_tokens=min_tokens, include_stop=include)
    assert ("".join(deltas), stream.stop_reason) == reference(tokens, stop, min_tokens, include)


def test_a_possible_stop_is_held_back_until_it_is_decided() -> None:
    stream = TextStream(lambda t: b"Hello ##!#"[t : t + 1], ["##!#"])
    assert [stream.push(t) for t in range(5)] == list("Hello")
    assert [stream.push(t) for t in (5, 6, 7)] == [" ", "", ""]
    assert stream.push(6) == "#"  # "###": the first of them can no longer begin the stop string
    assert [stream.push(t) for t in (8, 9)] == ["", ""]
    assert stream.stop_reason == "##!#"
    assert stream.finish() == ""


def test_a_character_split_over_tokens_appears_whole() -> None:
    assert run([8, 9], [])[0] == ["", "🙂", ""]


def test_a_character_never_finished_becomes_a_replacement() -> None:
    assert run([0, 8], [])[0] == ["a", "", "�"]


def test_the_longer_of_two_stops_that_end_together_is_reported() -> None:
    deltas, stream = run([6, 2], ["b", "ab"])
    assert ("".join(deltas), stream.stop_reason) == ("x", "ab")
