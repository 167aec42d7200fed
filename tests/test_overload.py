"""``make bench-overload``: what its rows tell of goodput and refusals."""

from __future__ import annotations

from bench.completions import Answered, Refused
from bench.traffic.overload import Seen, verdict


def test_a_row_of_overload_tells_goodput_and_which_refusals_are_not_as_they_should_be() -> None:
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\n\r\n"
    said = [(head, b'{"error": {"code": "server_overloaded"}}'), (head, b"busy"),
            (b"HTTP/1.1 429 Too Many Requests\r\n\r\n", b'{"error": {"code": "server_overloaded"}}')]
    seen = Seen([20.0, 50.0, 60.0], [Answered(20, 0.5, 2.0, rounds=8)] * 100, lasted_s=12.0,
                refusals=[Refused(1, 429, *words) for words in said], counted=2.0)
    row = seen.row(2.0, 16.0)
    assert (row["goodput"], row["first_p99_s"], row["whole_p99_s"], row["a_round"]) == (50.0, 0.5, 2.0, 2.5)
    assert (row["refused"], row["untold"], row["uncounted"], row["told_s"]) == (3, 2, 1, 3.0)
    peak = Seen([62.5], seen.answers, lasted_s=12.0).row(1.0, 8.0)
    assert "0.80 of the peak" in verdict([peak, row])
