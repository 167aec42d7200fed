"""canitoolcall: its probe, and what models of each family wrote, as it recorded that: whole and streamed.

What a model wrote is sent as the message that the target repeats. Left out, by tags and words of theirs: forms that
no model here writes (``FOREIGN``), and a call within reasoning, which other models only think of. A call that is cut
has been streamed by then, and stays told: such an answer's finish must not be ``tool_calls``.
"""

import json
import os
from collections.abc import Iterator

from canitoolcall.checks import compare, describe_difference, expected_as_result
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.probe import ProbeExpectation, Scenario, chat_response, probe
from canitoolcall.results import Status
from checks import API, MODEL, begin, check

FAMILIES = json.loads(os.environ["SLIPSTREAM_FAMILIES"])
# DeepSeek 3.2 and 4, Kimi K3, Llama 4: no target here runs those models.
FOREIGN = ("｜DSML｜", "<|open|>", "<|close|>")
TAGS = {"x-llama-pythonic", "x-kimi-k3", "x-call-inside-think", "x-think-text"}


def applying(family: str) -> Iterator[Fixture]:
    for fixture in load_fixtures():
        if fixture.family == family and not (TAGS & set(fixture.tags) or any(
                mark in fixture.raw_output for mark in FOREIGN)):
            yield fixture


def replay(fixture: Fixture, url: str) -> None:
    raw = fixture.raw_output
    before, closed, _ = raw.partition("</think>")
    begun = "x-think-no-open-tag" in fixture.tags or (bool(closed) and "<think>" not in before) or (
        fixture.generation_prompt or "").rstrip().endswith("<think>")
    cut = {"max_tokens": len(raw.encode())} if "truncated" in fixture.tags else {}
    scenario = Scenario(fixture.id, "", ({"role": "user", "content": raw},), fixture.tools, ProbeExpectation(),
                        extra_body={"chat_template_kwargs": {"thinking": begun}, **cut})
    whole, *streamed = [chat_response(f"{url}/v1", MODEL, scenario, stream=stream) for stream in (False, True, True)]
    for answer in streamed:
        assert compare(whole.result, answer.result) is Status.PASS, f"{fixture.id}: streamed is not whole"
    assert not whole.problems and not streamed[0].problems, f"{fixture.id}: {whole.problems}, {streamed[0].problems}"
    if fixture.expected is None or cut:
        if whole.result.tool_calls:
            assert {answer.finish_reason for answer in (whole, *streamed)} <= {"length", "stop"}, fixture.id
    else:
        wanted = expected_as_result(fixture.expected)
        assert compare(wanted, whole.result) in (Status.PASS, Status.SOFT_PASS), (
            f"{fixture.id}: {describe_difference(wanted, whole.result)}")


begin("canitoolcall")


@check("probe")
def _() -> None:
    report = probe(API, MODEL, timeout_s=300.0)
    print(report.render_text())
    assert report.summary()["pass"] == len(report.outcomes) == 27, report.summary()
    assert not any(outcome.warnings for outcome in report.outcomes)


for family, url in FAMILIES.items():
    @check(f"outputs of {family}")
    def _(family: str = family, url: str = url) -> None:
        fixtures = list(applying(family))
        print(f"{family}: {len(fixtures)} outputs")
        assert len(fixtures) > 10
        wrong = []
        for fixture in fixtures:
            try:
                replay(fixture, url)
            except AssertionError as error:
                wrong.append(fixture.id)
                print(error)
        assert not wrong, ", ".join(wrong)
