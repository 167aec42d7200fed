"""guidellm: a few synthetic requests over chat and over completions; none may fail."""

import json
import sys
from pathlib import Path

from checks import KEY, MODEL, SCRATCH, TOKENIZER, URL, begin, check, command

GUIDELLM = str(Path(sys.executable).with_name("guidellm"))

begin("guidellm")

for page in ("chat/completions", "completions"):
    @check(page.replace("chat/completions", "chat"))
    def _() -> None:
        out = Path(SCRATCH, "out.json")
        out.unlink(missing_ok=True)
        command(GUIDELLM, "run", "--backend",
                f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format=/v1/{page}",
                "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
                "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
                "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
                "--output", f"kind=json,path={out}", "--disable-console")
        done = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert done["successful"] == 3 and not done["errored"], done
