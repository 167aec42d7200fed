"""openai-agents: text, stream, typed output, a forced tool, over responses (its default) and over chat."""

from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from checks import MODEL, begin, check
from openai import AsyncOpenAI
from pydantic import BaseModel

MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
set_tracing_disabled(True)
painted = []


class Sky(BaseModel):
    colour: Literal["blue", "grey"]
    clouds: bool


@function_tool
def paint(colour: Literal["red", "blue"]) -> str:
    """Paint the wall."""
    painted.append(colour)
    return "done"


def agent(kind: str, **more: object) -> Agent:
    settings = ModelSettings(max_tokens=300, temperature=0.0, **more.pop("settings", {}))
    return Agent(name="painter", model=MODELS[kind](model=MODEL, openai_client=AsyncOpenAI()),
                 model_settings=settings, **more)


begin("openai-agents")

for kind in MODELS:
    @check(f"{kind}: text")
    async def _() -> None:
        assert isinstance((await Runner.run(agent(kind), "Say something.")).final_output, str)

    @check(f"{kind}: stream")
    async def _() -> None:
        stream = Runner.run_streamed(agent(kind), "Say something.")
        assert [event async for event in stream.stream_events()]

    @check(f"{kind}: typed")
    async def _() -> None:
        found = await Runner.run(agent(kind, output_type=Sky), "What is the sky like?")
        assert isinstance(found.final_output, Sky)

    @check(f"{kind}: tool")
    async def _() -> None:
        painted.clear()
        await Runner.run(agent(kind, tools=[paint], tool_use_behavior="stop_on_first_tool",
                               settings={"tool_choice": "required"}), "Paint the wall.")
        assert painted and set(painted) <= {"red", "blue"}
