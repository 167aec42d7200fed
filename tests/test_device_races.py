"""The kernels that choose on a GPU: who gets them, that a trial sees a wrong one, that what they leave is chosen, and,
where Triton is (`make triton`), that they say what ``choosing`` does and compile for an H100."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bench.gpu.shapes import TINY, config_of
from slipstream.base.offload import main_command
from slipstream.choosing.sampling import ChoiceRows, Winners, choose, rank, ranked
from slipstream.engine.ops.fused import triton_unsupported_reason
from slipstream.engine.ops.races import difference, plain_rows, race_for, supports
from slipstream.engine.proof import question_for
from slipstream.protocol.requests import Sampling
from tests.test_fused import needs_triton, own_python

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = config_of(TINY)
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Specified:
    """A race that computes with torch, and turns what it found."""

    width: int = 300
    vocabulary: torch.Tensor | None = None
    turned: Callable[[torch.Tensor, torch.Tensor], Pair] = lambda ids, scores: (ids, scores)
    calls: int = 0

    def __call__(self, logits: torch.Tensor, sessions: Sequence[ChoiceRows], most: int) -> Winners | None:
        self.calls += 1
        tokens, scores, sure = list[int](), list[float](), list[int]()
        for session in sessions:
            few = min(most, self.width)
            ids, shares = self.turned(*rank(logits, session, few, self.vocabulary))
            pad = torch.nn.functional.pad
            tokens += pad(ids, (0, most - few)).ravel().tolist()
            scores += pad(torch.log_softmax(shares, 1), (0, most - few), value=-torch.inf).ravel().tolist()
            taken = supports(session, most == 1, self.width)
            sure += [int(taken and bool(best > -torch.inf)) for best in shares[:, 0]]
        return Winners(tokens, scores, sure)

    def children(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, scores = self.turned(*rank(logits, plain_rows(len(logits)), k, self.vocabulary))
        return ids, scores.double()


def test_a_cpu_keeps_what_it_had() -> None:
    for choice in ("auto", "native", "torch"):
        assert race_for(choice, CONFIG, CPU) is None
    assert "this one is 'cpu'" in triton_unsupported_reason(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines where a GPU's kernels must fail")
def test_what_fails_in_its_trial_is_a_reason_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert race_for("auto", CONFIG, CUDA) is None
    told = capsys.readouterr().out
    assert "torch's choice of tokens" in told and "reason=" in told
    assert race_for("torch", CONFIG, CUDA) is None and not capsys.readouterr().out


@needs_triton
def test_what_another_process_objects_to_is_not_used(capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.ops.races.triton_unsupported_reason", lambda device: "")
    seen = []

    def objects(what: str, config: object, dtype: torch.dtype, device: torch.device) -> str:
        seen.append((what, config))
        return "a row is off"

    some = torch.arange(0, 60, 2)
    assert race_for("auto", CONFIG, CUDA, some, objects) is None and "a row is off" in capsys.readouterr().out
    assert seen == [("choosing", replace(CONFIG, vocab_size=30))]
    assert race_for("auto", CONFIG, CUDA, some.flip(0), objects) is None and len(seen) == 1
    assert "do not ascend" in capsys.readouterr().out


@pytest.mark.parametrize(("what", "turned"), [
    ("choices", lambda ids, scores: (ids + 1, scores)), ("scores", lambda ids, scores: (ids, scores + 0.01)),
    ("tokens", lambda ids, scores: (ids[:, [1, 0, *range(2, ids.shape[1])]] if ids.shape[1] == 8 else ids, scores)),
    ("choices", lambda ids, scores: (ids, scores * torch.nan)),
], ids=["a token is off", "a sum is off", "two are exchanged", "no number"])
def test_a_trial_sees_what_is_wrong(what: str, turned: Callable[..., Pair]) -> None:
    assert difference(Specified(), CPU) == difference(Specified(vocabulary=2 * torch.arange(300)), CPU) == ""
    assert difference(Specified(turned=turned), CPU).startswith(what)


def test_rows_that_a_race_does_not_take_are_chosen_all_the_same() -> None:
    logits, race = torch.randn(12, 300), Specified()
    samplings = [Sampling(temperature=1.0, seed=1), Sampling(temperature=0.7, top_p=0.5, seed=2), Sampling(),
                 Sampling(temperature=1.0, seed=3, logit_bias=((5, 30.0),)), Sampling(logit_bias=((7, 30.0),))]
    cuts = (range(3), range(3, 5), range(5, 7), range(7, 11), range(11, 12))
    sessions = [ChoiceRows(sampling, cut, cut, range(len(cut)), None, [()] * len(cut))
                for sampling, cut in zip(samplings, cuts, strict=True)]
    assert choose(logits, sessions, None, race) == choose(logits, sessions) and race.calls == 1
    for found, right in zip(ranked(logits, sessions, 4, None, race), ranked(logits, sessions, 4), strict=True):
        assert list(found[0]) == list(right[0]) and found[1] == pytest.approx(right[1], abs=1e-6)


def test_a_witness_says_why_there_is_nothing_to_see() -> None:
    question = json.dumps(question_for("choosing", CONFIG, torch.float32))
    done = subprocess.run([*main_command("slipstream.engine.witness"), question, "cpu"], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip()


@needs_triton
@pytest.mark.parametrize("times", ["1", pytest.param("3", marks=pytest.mark.long)])
def test_kernels_say_what_choosing_does(tmp_path: Path, times: str) -> None:
    told = own_python(tmp_path, "-m", "tests.raced", times, TRITON_INTERPRET="1")
    assert "children compared" in told.splitlines()[-1]


@needs_triton
def test_kernels_compile_for_an_h100_and_keep_their_numbers_wide(tmp_path: Path) -> None:
    assert "kernels compiled" in own_python(tmp_path, "-m", "tests.raced", TRITON_INTERPRET="0").splitlines()[-1]
