"""Our router in front of two targets whose engine is vLLM, with a draft service: clients see one answer, greedy or with
a seed, whatever dies.

The tests go on with what the one before left: the draft comes after the plain answers, the last two end the targets.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.fleet import free_port
from tests.scraped import scraped
from tests_vllm.running import MODEL, PROMPTS, ROOT, Server, draft, quiet

TOKENS = 96
ASKED = [*((prompt, 0.0) for prompt in PROMPTS), (PROMPTS[0], 0.8), (PROMPTS[1], 0.8)]
SETTINGS = ("model.dtype=float32", "target.max_sessions=8", "target.policy.max_nodes=4", "target.policy.always=true",
            "target.prompt_lookup=false", "target.engine={vllm: {enforce_eager: true, max_model_len: 1024}}")
pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Said:
    """An answer as a client read it."""

    text: str = ""
    chunks: int = 0
    accepted: int = 0
    finish: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # some of it is there


class Stack:
    """The processes."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.http, self.page, self.draft_port = (free_port() for _ in range(3))
        self.targets = [self._target(python, folder, number) for number in range(2)]
        for target, _ in self.targets:
            target.wait()
        listens = [address for _, address in self.targets]
        self.router = Server(
            [sys.executable, "-m", "router_service", *settings(
                f"router.listen=127.0.0.1:{self.http}", f"router.grpc_listen=127.0.0.1:{free_port()}",
                f"router.metrics_listen=127.0.0.1:{self.page}", f"router.targets=[{','.join(listens)}]")],
            folder / "router.log", f"127.0.0.1:{self.page}", "/ready", None, ROOT)
        self.router.wait()
        self.drafts: list[subprocess.Popen[bytes]] = []
        self.client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.http}/v1", api_key="-", max_retries=0)

    def _target(self, python: Path, folder: Path, number: int) -> tuple[Server, str]:
        listen, page = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        command = [python, "-m", "target_service", *settings(
            *SETTINGS, f"target.listen={listen}", f"target.metrics_listen={page}",
            f"target.drafts=[127.0.0.1:{self.draft_port}]")]
        return Server(command, folder / f"target-{number}.log", page, "/ready", quiet(), folder), listen

    async def ask(self, prompt: str, temperature: float = 0.0, said: Said | None = None, tokens: int = TOKENS) -> Said:
        said = said or Said()
        stream = await self.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": prompt}], temperature=temperature, seed=3,
            max_tokens=tokens, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                said.text += chunk.choices[0].delta.content
                said.chunks += 1
            if chunk.choices and chunk.choices[0].finish_reason:
                said.finish = chunk.choices[0].finish_reason
            if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                said.accepted = chunk.usage.completion_tokens_details.accepted_prediction_tokens or 0
            if said.chunks >= 4:
                said.begun.set()
        return said

    async def ask_all(self) -> list[Said]:
        return await asyncio.gather(*(self.ask(*one) for one in ASKED))

    def end(self) -> None:
        for process in self.drafts:
            process.kill()
            process.wait()
        for server in (self.router, *(target for target, _ in self.targets)):
            server.end()


def settings(*given: str) -> list[str]:
    return [word for one in given for word in ("--set", one)]


@pytest.fixture(scope="module")
def stack(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(vllm_python, tmp_path_factory.mktemp("stack"))
    yield made
    made.end()


@pytest.fixture(scope="module")
async def plain(stack: Stack) -> Sequence[str]:
    """What is said while no draft is there."""
    said = await stack.ask_all()
    assert not any(one.accepted for one in said)
    return [one.text for one in said]


async def test_answers_are_the_plain_ones_and_usage_tells_what_drafts_gave(stack: Stack, plain: Sequence[str]) -> None:
    stack.drafts.append(draft(stack.draft_port))
    for _ in range(60):
        said = await stack.ask_all()
        assert [one.text for one in said] == plain
        if sum(one.accepted for one in said):
            break
    else:
        raise AssertionError("no draft token was accepted")
    assert {one.finish for one in said} <= {"stop", "length"} and all(one.chunks > 4 for one in said)
    whole = await stack.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPTS[3]}], temperature=0.0, max_tokens=TOKENS)
    assert whole.choices[0].message.content == plain[3]


async def test_fields_are_honoured_or_refused_by_name(stack: Stack) -> None:
    ask = stack.client.chat.completions.create
    messages = [{"role": "user", "content": PROMPTS[1]}]
    sampled = await ask(model=MODEL, messages=messages, temperature=0.8, seed=3, max_tokens=8, logprobs=True,
                        top_logprobs=2, presence_penalty=0.5, stop=["zzz"])
    places = sampled.choices[0].logprobs.content
    assert sampled.usage.completion_tokens == len(places) == 8
    assert all(len(place.top_logprobs) == 2 and place.logprob <= 0.0 for place in places)
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        await ask(model=MODEL, messages=messages, max_tokens=8, logit_bias={"7": 2})


async def test_answers_keep_to_grammars_and_forced_tools_with_drafts(stack: Stack) -> None:
    ask = stack.client.chat.completions.create
    messages = [{"role": "user", "content": PROMPTS[1]}]
    schema = {"type": "object", "properties": {"facts": {"type": "array", "items": {"enum": ["round", "far", "grey"]},
                                                         "minItems": 3, "maxItems": 5}},
              "required": ["facts"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}

    forced = {"type": "function", "function": {"name": "tell"}}

    async def said(**more: Any) -> Any:
        answer = await ask(model=MODEL, messages=messages, temperature=0.0, max_tokens=TOKENS, **more)
        assert answer.choices[0].finish_reason in ("stop", "tool_calls")
        return answer.choices[0].message

    bound = {"response_format": {"type": "json_schema", "json_schema": {"name": "facts", "schema": schema}}}
    plain = await said(**bound, extra_body={"speculate": False})
    assert (await said(**bound)).content == plain.content
    assert 3 <= len(json.loads(plain.content)["facts"]) <= 5
    assert (await said(extra_body={"guided_choice": ["yes", "no"]})).content in ("yes", "no")
    (call,) = (await said(tools=[tool], tool_choice=forced)).tool_calls
    assert call.function.name == "tell" and 3 <= len(json.loads(call.function.arguments)["facts"]) <= 5
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        await ask(model=MODEL, messages=messages, max_tokens=8, **bound, extra_body={"min_tokens": 2})


async def test_answers_of_a_target_that_is_killed_go_on_exactly(stack: Stack, plain: Sequence[str]) -> None:
    said = [Said() for _ in ASKED]
    asked = [asyncio.create_task(stack.ask(*what, one)) for what, one in zip(ASKED, said, strict=True)]
    await asyncio.gather(*(one.begun.wait() for one in said))
    stack.targets[0][0].signal(signal.SIGKILL)
    await asyncio.gather(*asked)
    assert [one.text for one in said] == plain
    assert await scraped(stack.page, "retries_total") > 0, "no answer had to move"


async def test_a_drain_lets_answers_finish_and_takes_no_more(stack: Stack, plain: Sequence[str]) -> None:
    last, said = stack.targets[1][0], Said()
    asked = asyncio.create_task(stack.ask(PROMPTS[0], said=said))
    await said.begun.wait()
    last.signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    assert not asked.done(), "it was over before the drain"
    with pytest.raises(openai.APIStatusError) as refused:
        await stack.ask(PROMPTS[1], tokens=4)
    assert refused.value.status_code in (429, 503)
    await asked
    assert said.text == plain[0]
    assert await asyncio.to_thread(last.process.wait, 60) == 0
