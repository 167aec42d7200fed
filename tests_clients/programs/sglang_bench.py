"""The payloads and readers of SGLang's `bench_serving` for servers that speak OpenAI's API."""

import argparse
import asyncio
import sys
from importlib.machinery import PathFinder
from types import ModuleType

from checks import API, MODEL, begin, check

# The benchmark alone: the package's own start would load its engine.
package = ModuleType("sglang")
package.__path__ = list(PathFinder.find_spec("sglang").submodule_search_locations)
sys.modules["sglang"] = package

from sglang.benchmark import serving  # noqa: E402

begin("sglang")


def ask(page: str, prompt: object) -> None:
    defaults = vars(argparse.Namespace(disable_stream=False, disable_ignore_eos=False, return_logprob=False,
                                       return_routed_experts=False, header=None, backend="sglang-oai", temperature=0.0,
                                       top_p=1.0, cache_report=False, tokenize_prompt=False, print_requests=False))
    serving.set_global_args(argparse.Namespace(**defaults))
    asked = serving.RequestFuncInput(prompt=prompt, api_url=f"{API}/{page}", prompt_len=8, output_len=8, model=MODEL,
                                     lora_name="", image_data=None, extra_request_body={})
    call = serving.ASYNC_REQUEST_FUNCS["sglang-oai-chat" if "chat" in page else "sglang-oai"]
    told = asyncio.run(call(asked))
    assert told.success and told.output_len == 8, told.error or told


@check("completions")
def _() -> None:
    ask("completions", "One, two,")


@check("chat")
def _() -> None:
    ask("chat/completions", "Say something.")
