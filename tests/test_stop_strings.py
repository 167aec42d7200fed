"""Stop strings, against a cut that looks at one character after the other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.text.scanner import StopStrings


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
