"""Text from tokens: whole characters, stop strings, whatever the grouping."""

from __future__ import annotations

import random

from outrider.engine.detokenizer import Detokenizer

TEXT = "héllo 🚀 wörld\r\n— end"


def text_of(
    pieces: list[bytes], stop: tuple[str, ...] = (), include: bool = False
) -> tuple[list[str], str, str | None]:
    """What is streamed per token, the text at the end, and the stop string that ended it."""
    detokenizer = Detokenizer(lambda i: pieces[i], lambda i: False, stop, include)
    sent, hit = [], None
    for i in range(len(pieces)):
        hit = detokenizer.push(i)
        if hit is not None:
            break
        sent.append(detokenizer.take())
    detokenizer.end(None)
    sent.append(detokenizer.take())
    return sent, detokenizer.text, hit


def split(data: bytes, rng: random.Random) -> list[bytes]:
    out = []
    while data:
        n = rng.randint(1, 4)
        out.append(data[:n])
        data = data[n:]
    return out


def test_any_split_into_tokens_streams_whole_characters() -> None:
    """Characters of up to four bytes cut anywhere: nothing half is ever sent, and the parts add up."""
    rng = random.Random(0)
    for _ in range(200):
        sent, text, hit = text_of(split(TEXT.encode(), rng))
        assert (text, hit) == (TEXT, None)
        assert "".join(sent) == TEXT
        assert not any("\ufffd" in part for part in sent)


def test_any_split_stops_at_the_same_place() -> None:
    """A stop string across tokens ends the text before it, and no part of it is sent."""
    rng = random.Random(1)
    for stop in ("wörld", "o", "🚀 w", "\r\n", "end"):
        for include in (False, True):
            for _ in range(50):
                sent, text, hit = text_of(split(TEXT.encode(), rng), (stop, "nowhere"), include)
                assert hit == stop
                assert text == TEXT[: TEXT.index(stop) + len(stop) * include]
                assert "".join(sent) == text


def test_a_text_that_ends_in_half_a_character_shows_it() -> None:
    """The bytes that are left become the replacement character, as in the whole text decoded at once."""
    sent, text, _ = text_of([b"a\xf0\x9f", b"\x9a"])
    assert text == b"a\xf0\x9f\x9a".decode("utf-8", "replace") == "".join(sent)


def test_the_earliest_stop_string_wins() -> None:
    """Two stop strings completed by the same token: the one that begins first."""
    assert text_of([b"xx", b"abcd"], ("cd", "bc")) == (["xx", "a"], "xxa", "bc")


def test_bytes_that_are_no_text_are_replaced_and_do_not_stall() -> None:
    """Broken UTF-8 in the middle does not hold back what follows."""
    sent, text, _ = text_of([b"a", b"\xff", b"b"])
    assert text == "a\ufffdb"
    assert sent[1:3] == ["\ufffd", "b"]
