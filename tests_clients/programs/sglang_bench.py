"""The payloads and readers of SGLang's `bench_serving` for servers that speak OpenAI's API."""

import argparse
import asyncio
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from checks import API, MODEL, begin, check

# The benchmark alone: these packages' own starts would load its engine, which takes a GPU's libraries.
place = Path(PathFinder.find_spec("sglang").submodule_search_locations[0])
for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = [str(place.joinpath(*name.split(".")[1:]))]
sys.modules["sglang.srt.disaggregation.utils"] = engine = ModuleType("utils")
engine.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # of engines that prefill elsewhere

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
