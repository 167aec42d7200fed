"""Stop strings, against a cut that looks at one character after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.text.scanner import StopStrings
from router_service.text.tokens import Completion, Detokenizer, TextCodec
from slipstream.protocol.requests import Piece, Request, Sampling, TokenLogprob

EOS = 256


def naive_cut(text: str, stops: list[str], passed: int = 0) -> tuple[str, str | None]:
    """Character by character: the first moment at which a stop string is complete, the longest of those. None ends in
    what is ``passed``."""
    for end in range(1 + passed, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[:end - len(longest)], longest
    return text, None


def few_letters(least: int, most: int) -> st.SearchStrategy[str]:
    return st.text("ab\n", min_size=least, max_size=most)


@settings(deadline=None, max_examples=400)
@given(pieces=st.lists(few_letters(0, 5), max_size=12), stops=st.lists(few_letters(1, 4), max_size=4),
       early=st.sampled_from([0, 0, 1, 3, 9]))
def test_stop_strings_cut_like_the_naive_cut(pieces: list[str], stops: list[str], early: int) -> None:
    cutter, keeper = StopStrings(stops), StopStrings(stops, keep=True)
    out, text = "".join([cutter.push(piece, i >= early) for i, piece in enumerate(pieces)]), "".join(pieces)
    kept = "".join([keeper.push(piece, i >= early) for i, piece in enumerate(pieces)])
    assert kept == out + (cutter.matched or "")
    assert text.startswith(out), "what is held back and never became a stop string is the rest"
    cut = naive_cut(text, stops, len("".join(pieces[:early])))
    assert (text if cutter.matched is None else out, cutter.matched) == cut


@settings(deadline=None, max_examples=200)
@given(pieces=st.lists(few_letters(0, 5), max_size=12), stops=st.lists(few_letters(1, 4), max_size=4))
def test_only_the_start_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    cutter, seen, out = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        out += cutter.push(piece)
        if cutter.matched is not None:
            return
        held = seen[len(out):]
        assert seen.startswith(out) and (held == "" or any(stop.startswith(held) for stop in stops))


def test_a_place_where_a_long_stop_string_may_begin_is_given_up_once() -> None:
    class Counted(str):
        asked = 0

        def startswith(self, *given: object) -> bool:  # type: ignore[override]
            Counted.asked += 1
            return super().startswith(*given)  # type: ignore[arg-type]

    cutter = StopStrings([Counted("a" * 1000 + f"{i:02}") for i in range(32)])
    text = ("a" * 999 + "x" + "ab") * 10
    assert "".join(cutter.push(char) for char in text) == text
    assert Counted.asked < 3 * 32 * len(text)


def test_stop_strings_over_several_pieces() -> None:
    cutter = StopStrings(["\n\nUser:", "###"])
    assert [cutter.push(piece) for piece in ("a#", "#b\n", "\nUs", "er", ": x", "more")] == ["a", "##b", "", "", "", ""]
    assert cutter.matched == "\n\nUser:"


class Given:
    """An Answer of bytes, as commits of so many; each has a log probability that names its place."""

    def __init__(self, tokens: list[int], size: int, drafted: int) -> None:
        self._tokens, self._size, self._drafted, self.closed = tokens, size, drafted, False

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for i in range(0, len(self._tokens), self._size):
            tokens = tuple(self._tokens[i : i + self._size])
            yield Piece(tokens, min(self._drafted, len(tokens) - 1), self._drafted,
                        tuple(TokenLogprob(-float(i + j)) for j in range(len(tokens))),
                        "stop" if i + self._size >= len(self._tokens) else "")

    def set_speculation(self, allowed: bool) -> None:
        pass

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize(("stops", "keep", "least", "text", "ended_by", "count"), [
    ([], False, 0, "one €: two", EOS, 13), ([], True, 0, "one €: two", EOS, 13),
    (["€:"], False, 0, "one ", "€:", 8), (["€:"], True, 0, "one €:", "€:", 8),
    (["e", "x"], False, 2, "on", "e", 3), (["e", "tw"], False, 3, "one €: ", "tw", 11),
    (["two!"], False, 0, "one €: two", EOS, 13)], ids=str)
async def test_log_probabilities_and_counts_do_not_depend_on_commits(
        tiny_folder: Path, stops: list[str], keep: bool, least: int, text: str, ended_by: str | int, count: int,
        all_tokens: bool) -> None:
    codec, tokens = TextCodec(tiny_folder), [*"one €: two".encode(), EOS]
    request = Request("r", (1,), Sampling(min_tokens=least, stop_token_ids=(EOS,)), len(tokens))
    for size in range(1, len(tokens) + 1):
        answer = Given(tokens, size, drafted=2)
        completion = Completion(request, answer, Detokenizer(codec), stops, 260, keep_stop=keep,
                                return_all_tokens=all_tokens)
        deltas = [delta async for delta in completion]
        found = [token for delta in deltas for token in delta.tokens]
        assert "".join(delta.text for delta in deltas) == "".join(token.text for token in found) == text
        places = list(range(len(found)))
        assert [(token.id, token.logprob and token.logprob.logprob, token.drafted) for token in found] == [
            (tokens[i], -float(i), i % size < min(2, len(tokens[i - i % size :][:size]) - 1)) for i in places]
        if all_tokens:
            assert len(found) == count
        assert (deltas[-1].finish, deltas[-1].stop) == ("stop", ended_by) and answer.closed
        assert completion.tally.tokens == sum(delta.num_tokens for delta in deltas) == count
        assert completion.tally.rounds == -(-count // size)
        accepted = [i % size < min(2, len(tokens[i - i % size :][:size]) - 1) for i in range(count)]
        assert completion.tally.accepted == sum(accepted)


class Words:
    """A Detokenizer of words, of which the last ends in the midst of a character."""

    def push(self, token: int) -> str:
        return ("one", " t</", "a> x")[token]

    def flush(self) -> str:
        return "\ufffd"


@pytest.mark.parametrize(("stops", "keep", "all_tokens", "told"), [
    (["</a>"], False, False, ["one", " t"]), (["</a>"], False, True, ["one", " t", ""]),
    (["</a>"], True, False, ["one", " t</", "a>"]), (["</a>", "t<"], False, False, ["one", " "])], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_the_token_in_which_a_stop_string_begins_keeps_what_is_before(
        stops: list[str], keep: bool, all_tokens: bool, told: list[str], size: int) -> None:
    completion = Completion(Request("r", (1,), Sampling(), 3), Given([0, 1, 2], size, 0), Words(), stops, 3,
                            keep_stop=keep, return_all_tokens=all_tokens)
    deltas = [delta async for delta in completion]
    found = [token for delta in deltas for token in delta.tokens]
    assert [token.text for token in found] == told and "".join(delta.text for delta in deltas) == "".join(told)
    assert [token.logprob for token in found] == [TokenLogprob(-float(i)) for i in range(len(told))]
