"""What documents say about the code is printed from the code."""

from __future__ import annotations

import re
from html import escape
from importlib import import_module
from pathlib import Path
from typing import cast, get_args

import pytest
import yaml
from click import Group
from pydantic import BaseModel
from typer.main import get_command

from deploy.dashboards import BOARDS
from deploy.dashboards.panels import Dashboard
from deploy.manual import FOLDERS, markdown, pages, tables, with_tables
from deploy.values import ImagesValues, ImageValues, Values
from slipstream.base.config import Config, config_yaml, load
from slipstream.cli.commands import app
from slipstream.protocol.session import TARGET_TABLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LOG = "MEASUREMENTS.md"  # its commands are those of the commits beside them
OURS = ("slipstream", "draft_service", "target_service", "router_service", "bench", "deploy", "tests", "tests_k8s")
NO_SETTINGS = ("config.json", "target.log", "router.request", "target.answer", "draft.session")  # files, spans


def test_printed_pages_are_in_step() -> None:
    stale = [page.name for page, text in pages().items() if (ROOT / page).read_text(encoding="utf-8") != text]
    assert not stale, f"{stale} differ from the code: run `make docs`"


def test_the_map_has_every_folder() -> None:
    folders = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("slipstream/*/__init__.py")}
    assert folders - {"slipstream/v1"} <= set(FOLDERS), "v1 is printed from proto"


def test_the_protocol_page_has_a_row_for_every_transition() -> None:
    page = (ROOT / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
    for (state, event), (after, _) in TARGET_TABLE.items():
        assert f"| {state} | {event} | {after} |" in page


def test_tables_replace_what_stood_between_the_marks() -> None:
    page = "before\n<!-- table: errors -->\nold\n<!-- end -->\nafter\n"
    fresh = with_tables(page, tables())
    assert "old" not in fresh and "| CapacityError |" in fresh
    assert fresh.startswith("before\n") and fresh.endswith("\nafter\n")
    assert with_tables(fresh, tables()) == fresh


def test_cells_with_bars_do_not_break_a_table() -> None:
    assert markdown(("a",), [("x|y",)]).splitlines()[-1] == r"| x\|y |"


def test_the_printed_configuration_is_the_configuration(tmp_path: Path) -> None:
    changed = load(None, ("target.policy.max_nodes=7", "target.drafts=[]", "router.model_name='a # b'"))
    for config in (Config(), changed):
        file = tmp_path / "slipstream.yaml"
        file.write_text(config_yaml(config), encoding="utf-8")
        assert load(file) == config


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != LOG], ids=lambda page: page.name)
def test_commands_that_pages_name_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    commands = cast(Group, get_command(app)).commands
    code = _code(page)
    missing = [f"make {name}" for name in re.findall(r"^\s*make ([a-z0-9-]+)", code, re.MULTILINE)
               if name not in targets]
    missing += [f"slipstream {name}" for name in re.findall(r"^\s*\S*slipstream ([a-z-]+)", code, re.MULTILINE)
                if name not in commands]
    modules = [name.replace(".", "/") for name in re.findall(r"python3? -m ([a-z_.]+)", code)]
    missing += [name for name in modules if name.split("/")[0] in OURS and not (ROOT / f"{name}.py").exists()
                and not (ROOT / name / "__main__.py").exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_pages_name_exist(page: Path) -> None:
    code = _code(page).replace("=", " ").replace(":", " ")
    named = set(re.findall(r"(?<![\w./-])((?:config|model|draft|target|router|wire|log)\.[a-zA-Z_.]*\w)", code))
    missing = [name for name in named if name not in NO_SETTINGS and not _is_setting(name)]
    assert not missing, f"{page.name} names settings that are not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_import_exists(page: Path) -> None:
    code = _code(page)
    for module, names in re.findall(r"^from (slipstream\S*) import (.+)$", code, re.MULTILINE):
        assert all(hasattr(import_module(module), name) for name in names.split(", "))
    for module in re.findall(r"^slipstream(?:\.[a-z]+)+$", code, re.MULTILINE):
        assert import_module(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    named = {name for name in re.findall(r"(?<![\w./-])((?:[a-z_]+/)+[a-z_]+\.(?:py|cpp|h|yaml|jsonl))", _code(page))
             if name.split("/")[0] in OURS}
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in re.findall(r"`(test_[a-z0-9_]+)`", page.read_text(encoding="utf-8"))
                if not (ROOT / "tests" / f"{name}.py").exists()]
    assert not missing, f"{page.name} names files that are not there"


def test_files_that_the_picture_of_a_round_names_exist() -> None:
    picture = (ROOT / "docs" / "round.svg").read_text(encoding="utf-8")
    named = [name for files in re.findall(r'class="file"[^>]*>([^<]+)<', picture) for name in files.split(" → ")]
    there = [f"/{path.relative_to(ROOT)}" for room in OURS[:4] for path in (ROOT / room).rglob("*.py")]
    assert named
    assert not [name for name in named if not any(path.endswith(f"/{name}.py") for path in there)]


def _code(page: Path) -> str:
    """What a page has in blocks and between backticks, a piece a line."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *(piece.replace("\n", " ") for piece in re.findall(r"`([^`]+)`", rest))])


def _is_setting(name: str) -> bool:
    """Is it a setting of the services, or a value of the chart?"""
    return _leads(Config, name.split(".")) or _leads(Values, name.split("."))


def _leads(section: type[BaseModel], path: list[str]) -> bool:
    field = section.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field is not None
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
    inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
    return _leads(inner, path[1:]) if inner else dict in kinds  # what a chart hands on as it is has any keys


def _anchors(page: Path) -> set[str]:
    heads = [line.lstrip("#").strip().lower() for line in page.read_text(encoding="utf-8").splitlines()
             if re.match("#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head)).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]*?)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [f"{file}#{anchor}" for file, anchor in links
               if "://" not in file and anchor not in _anchors(page.parent / file if file else page)]
    assert not missing


def test_services_by_hand_find_each_other_with_the_file_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "MACHINES.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    file = tmp_path / "slipstream.yaml"
    file.write_text(found[1])
    config = load(file)
    assert config.target.drafts == (config.draft.listen,) and config.router.targets == (config.target.listen,)
    assert set(re.findall(r"^slipstream (\w+) --config", page, re.MULTILINE)) == {"draft", "target", "router"}


def test_the_page_says_what_the_pods_of_the_small_profile_ask_for() -> None:
    helm = ROOT / "deploy" / "helm"
    values = yaml.safe_load((helm / "slipstream" / "values.yaml").read_text(encoding="utf-8"))
    profile = yaml.safe_load((helm / "values-cpu.yaml").read_text(encoding="utf-8"))
    preparing = values["model"]["prepareResources"]
    cpus = asked = most = 0.0
    for role in ("router", "target", "draft"):
        section = values[role] | profile.get(role, {})
        both, count = (section["resources"], preparing), section["replicas"]  # a pod counts with the larger of the two
        cpus += count * max(_amount(wanted["requests"]["cpu"]) for wanted in both)
        asked += count * max(_amount(wanted["requests"]["memory"]) for wanted in both)
        most += count * max(_amount(wanted["limits"]["memory"]) for wanted in both)
    told = f"ask for {cpus:g} CPUs and {asked / 2**30:.1f} GiB"
    assert f"{told}, and may take {most / 2**30:.1f} GiB" in (ROOT / "docs" / "INSTALL.md").read_text(encoding="utf-8")
    assert told in (helm / "values-cpu.yaml").read_text(encoding="utf-8")


def test_the_page_of_images_names_the_repository_of_each() -> None:
    page = (ROOT / "docs" / "KUBERNETES.md").read_text(encoding="utf-8")
    kinds = [name for name, field in ImagesValues.model_fields.items() if isinstance(field.default, ImageValues)]
    assert len(kinds) == 3 and not [kind for kind in kinds if f"`images.{kind}.repository`" not in page]


def _amount(quantity: str) -> float:
    """A quantity as Kubernetes writes it."""
    for unit, factor in (("Mi", 2.0**20), ("Gi", 2.0**30), ("m", 1e-3)):
        if quantity.endswith(unit):
            return float(quantity.removesuffix(unit)) * factor
    return float(quantity)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_the_picture_of_a_board_has_all_its_panels(board: Dashboard) -> None:
    """`make test-k8s` draws them, in build/dashboards."""
    picture = (ROOT / "docs" / "dashboards" / f"{board.name}.svg").read_text(encoding="utf-8")
    assert not [panel.title for panel in board.panels() if f">{escape(panel.title)}<" not in picture]
