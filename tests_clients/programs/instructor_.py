"""instructor: an object by tools, by JSON mode, by JSON schema, and one that comes in parts."""

from typing import Literal

import instructor
from checks import MODEL, begin, check
from openai import OpenAI
from pydantic import BaseModel

ASKED = [{"role": "user", "content": "What is the sky like?"}]


class Sky(BaseModel, extra="forbid"):  # an open object a small model seldom ends
    colour: Literal["blue", "grey"]
    clouds: bool


begin("instructor")

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    @check(mode.name.lower())
    def _() -> None:
        client = instructor.from_openai(OpenAI(), mode=mode)
        found = client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Sky, max_tokens=300,
                                               max_retries=0)
        assert isinstance(found, Sky)


@check("partial")
def _() -> None:
    client = instructor.from_openai(OpenAI())
    parts = list(client.chat.completions.create_partial(model=MODEL, messages=ASKED, response_model=Sky,
                                                        max_tokens=300, max_retries=0))
    assert parts[-1].colour in ("blue", "grey")
