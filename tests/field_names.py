"""``python -m tests.field_names VLLM.whl SGLANG.whl > tests/field_names.json``: the names of the fields of their
requests, and of those of the installed openai client. Names only."""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

SNAPSHOT = Path(__file__).parent / "field_names.json"
REQUESTS = ("ChatCompletionRequest", "CompletionRequest", "PDRoutingFields")


def of_openai() -> set[str]:
    kinds = (chat_create_params.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsBase)
    return {name for kind in kinds for name in kind.__annotations__} | {"stream"}


def of_wheel(path: Path) -> tuple[str, set[str]]:
    """``name version``, and the annotated names of its request classes."""
    project, release = path.name.split("-")[:2]
    names: set[str] = set()
    with zipfile.ZipFile(path) as wheel:
        for file in wheel.namelist():
            if "/entrypoints/openai/" in file and file.endswith("protocol.py"):
                for node in ast.parse(wheel.read(file)).body:
                    if isinstance(node, ast.ClassDef) and node.name in REQUESTS:
                        names |= {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)
                                  and isinstance(field.target, ast.Name) and not field.target.id.startswith("_")}
    return f"{project} {release}", names


if __name__ == "__main__":
    told = {f"openai {version('openai')}": of_openai(), **dict(of_wheel(Path(path)) for path in sys.argv[1:])}
    print(json.dumps({project: sorted(names) for project, names in told.items()}, indent=1))
