"""Prints the parts of ``docs/`` that come from code: the configuration, the protocol's tables, the map of folders."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from router_service.dialects.fields import GRPC_DIFFERENCES, HONOURED, INERT, REFUSED
from slipstream.base.config import Config, config_yaml
from slipstream.base.errors import STATUS
from slipstream.protocol.messages import DROP_REASONS, FEATURE_DTYPES, PROTOCOL_VERSION
from slipstream.protocol.session import LEASE_S, TARGET_TABLE
from slipstream.protocol.tree import MAX_HELD, MAX_NODES
from slipstream.wire.channel import RULES
from slipstream.wire.codec import MAX_PROJECTION_BYTES, MAX_TAPS
from slipstream.wire.link import FIRST_BACKOFF_S, PROJECTION_S
from slipstream.wire.servicer import MAX_PEERS

FOLDERS = ("slipstream/base", "slipstream/protocol", "slipstream/decision", "slipstream/following", "slipstream/wire",
         "slipstream/choosing", "slipstream/grammar", "slipstream/engine", "slipstream/drafting", "slipstream/models",
         "slipstream/observe", "slipstream/simulate", "slipstream/train", "slipstream/cli", "draft_service",
         "target_service", "router_service", "bench", "deploy")

ROOT, DOCS = Path(__file__).parent.parent, Path("docs")
Rows = Sequence[Sequence[str]]

CONFIG_PAGE = """# Configuration

One YAML file, given to every service with `--config`; single settings with `--set section.key=value`. Below are all
settings with their defaults. Write only what you change: the rest keeps its default. An unknown key is an error that
names the nearest known one. This page is printed by `make docs`; `slipstream config` prints what is in force.

```yaml
{yaml}```
"""


def pages() -> dict[Path, str]:
    """The pages that the code prints, by their path from the checkout's root, as they should be."""
    new_tables = {"map": folder_map(), **tables()}
    updated = {page: with_tables((ROOT / page).read_text(encoding="utf-8"), new_tables)
               for page in (DOCS / "API.md", DOCS / "ARCHITECTURE.md", DOCS / "PROTOCOL.md")}
    return {DOCS / "CONFIG.md": CONFIG_PAGE.format(yaml=config_yaml(Config())), **updated}


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """``page`` with new tables between its ``<!-- table: NAME -->`` and ``<!-- end -->`` marks."""
    def replacement(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"
    return re.sub(r"<!-- table: ([a-z]+) -->\n.*?<!-- end -->", replacement, page, flags=re.DOTALL)


def folder_map() -> str:
    """Every folder with the first sentence of its docstring."""
    rows = [(f"`{folder}/`", _sentence(ROOT / folder / "__init__.py")) for folder in FOLDERS]
    return markdown(("folder", "what it is"), rows)


def tables() -> dict[str, str]:
    """Every table of the pages about protocol and API, by name."""
    return {
        "target": markdown(("state", "event", "next state", "what is done"), [
            (state.value, event.value, after.value, "" if action == "-" else action)
            for (state, event), (after, action) in TARGET_TABLE.items()]),
        "limits": markdown(("limit", "value", "what happens beyond it"), _limits()),
        "errors": markdown(("error", "what it means", "gRPC", "HTTP", "OpenAI type"), _errors()),
        "honoured": "\n".join(f"- {names}: {text}" for names, text in _group_by_text(HONOURED)),
        "grpc": "\n".join(f"- {names}: {text}" for names, text in _group_by_text(GRPC_DIFFERENCES)),
        "inert": ", ".join(f"`{name}`" for name in sorted(INERT)) + ".",
        "refused": "\n".join(f"- {names}: {advice}." for names, advice in _group_by_text(_refused())),
    }


def markdown(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _sentence(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    sentence = " ".join(paragraph.split()).partition(". ")[0].replace("``", "`")
    return sentence if not sentence or sentence.endswith((".", "?")) else sentence + "."


def _limits() -> Rows:
    dtypes = ", ".join(f"{name} ({size} bytes)" for name, size in FEATURE_DTYPES.items())
    return (
        ("protocol version", str(PROTOCOL_VERSION), "the stream is refused, naming `protocol_version`"),
        ("nodes of one growth", str(MAX_NODES - 1), "the item is invalid; no more are verified in one step"),
        ("nodes that a target holds of one answer", str(MAX_HELD - 1), "growth beyond it is cut"),
        ("bytes of one message", str(RULES.message_bytes),
         "frames are split between items; a single item that is too large is given up for its session"),
        ("layers that a drafter reads", str(MAX_TAPS), "the handshake is refused, naming `features.layers`"),
        ("bytes of a projection", str(MAX_PROJECTION_BYTES), "the handshake is refused, naming `features.projection`"),
        ("number types of features", dtypes, "the item is invalid"),
        ("reasons of a Drop", ", ".join(DROP_REASONS), "others count as gap"),
        ("targets of one draft", str(MAX_PEERS), "the stream is refused; the target tries again"),
        ("batches that wait to be sent", str(RULES.waiting_batches),
         "the stream is reset; the next one opens sessions again"),
        ("time for the handshake", f"{RULES.handshake_s:g} s", "the stream ends; the target tries again"),
        ("time for a projection", f"{PROJECTION_S:g} s", "the stream ends; the target tries again"),
        ("silence on a stream", f"{1.5 * RULES.keepalive_s:g} s", "the stream ends on both ends"),
        ("wait before a reconnect", f"random, below {FIRST_BACKOFF_S:g} s at first, later below "
         f"{RULES.backoff_max_s:g} s", ""),
        ("wait after a refused handshake", f"{RULES.refused_retry_s:g} s", ""),
        ("silence about a session on the draft", f"{LEASE_S:g} s",
         "the session is freed with Drop(expired)"),
    )


def _refused() -> Mapping[str, str]:
    neutral = {name: "|".join(map(json.dumps, field.neutral)) for name, field in REFUSED.items()}
    return {f"{name}={neutral[name]}" if neutral[name] else name: field.advice for name, field in REFUSED.items()}


def _group_by_text(texts: Mapping[str, str]) -> Rows:
    """Rows in which names with the same text are joined."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(f"`{name}`")
    return [(", ".join(same_text), text) for text, same_text in names.items()]


def _errors() -> Rows:
    return [(error.__name__, (error.__doc__ or "").partition("\n")[0].replace("``", "`"), grpc, str(http), openai)
            for error, grpc, http, openai in STATUS]
