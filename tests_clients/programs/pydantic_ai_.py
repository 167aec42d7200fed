"""pydantic-ai: text, stream, outputs by tool and by schema, over chat and over responses."""

from typing import Literal

from checks import MODEL, begin, check
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings

CHAT, RESPONSES = OpenAIChatModel(MODEL), OpenAIResponsesModel(MODEL)
FEW = ModelSettings(max_tokens=300)


class Sky(BaseModel):
    colour: Literal["blue", "grey"]
    clouds: bool


begin("pydantic-ai-slim")


@check("text")
def _() -> None:
    assert isinstance(Agent(CHAT, model_settings=FEW).run_sync("Say something.").output, str)


@check("stream")
async def _() -> None:
    async with Agent(CHAT, model_settings=FEW).run_stream("Say something.") as result:
        assert [piece async for piece in result.stream_text(delta=True)]


for name, model in (("chat", CHAT), ("responses", RESPONSES)):
    for how, output in (("tool", ToolOutput(Sky)), ("schema", NativeOutput(Sky))):
        @check(f"{how} over {name}")
        def _() -> None:
            agent = Agent(model, output_type=output, model_settings=FEW, retries=0)
            assert isinstance(agent.run_sync("What is the sky like?").output, Sky)
