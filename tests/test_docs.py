"""What documents say about the code is printed from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from slipstream.base.config import Config, load
from slipstream.cli.manual import config_yaml, markdown, pages, tables, with_tables
from slipstream.protocol.session import DRAFT_TABLE, TARGET_TABLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_printed_pages_are_in_step() -> None:
    stale = [page.name for page, text in pages(ROOT).items() if page.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale} differ from the code: run `make docs`"


def test_the_protocol_page_has_a_row_for_every_transition() -> None:
    page = (ROOT / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
    for table in (TARGET_TABLE, DRAFT_TABLE):
        for (state, event), (after, _) in table.items():
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


def test_readme_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", readme, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"README names `make {target}`"


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
    cpus = asked = most = 0.0
    for role in ("router", "target", "draft"):
        section = values[role] | profile.get(role, {})
        wanted, count = section["resources"], section["replicas"]
        cpus += count * _amount(wanted["requests"]["cpu"])
        asked += count * _amount(wanted["requests"]["memory"])
        most += count * _amount(wanted["limits"]["memory"])
    told = f"ask for {cpus:g} CPUs and {asked / 2**30:.1f} GiB"
    assert f"{told}, and may take {most / 2**30:.1f} GiB" in (ROOT / "docs" / "INSTALL.md").read_text(encoding="utf-8")
    assert told in (helm / "values-cpu.yaml").read_text(encoding="utf-8")


def _amount(quantity: str) -> float:
    """A quantity as Kubernetes writes it."""
    for unit, factor in (("Mi", 2.0**20), ("Gi", 2.0**30), ("m", 1e-3)):
        if quantity.endswith(unit):
            return float(quantity.removesuffix(unit)) * factor
    return float(quantity)
