"""``target.policy.always``: every tree is verified whole, whatever it brings."""

from __future__ import annotations

from pathlib import Path

from slipstream.base.config import DraftSection, GrowthSection, ModelSection, PolicySection
from slipstream.drafting import create
from slipstream.protocol.messages import Sampling
from slipstream.protocol.requests import Request
from tests.pair import drafting, local_link, target
from tests.tiny import write_tiny_model

WHOLE = PolicySection(max_nodes=16, always=True, deadline_max_s=10.0)


async def test_whole_trees_are_verified_even_if_nothing_is_accepted(tiny_folder: Path, tmp_path: Path) -> None:
    """As far as the answer goes on; a policy left to itself would verify fewer nodes, and soon none."""
    stranger = write_tiny_model(tmp_path / "stranger", seed=77)
    section = DraftSection(drafter="standalone", model=str(stranger), dtype="float64", growth=GrowthSection(
        num_steps=4, topk=4, num_draft_tokens=16))
    request = Request("1", tuple(b"the cat sat on the mat and"), Sampling(), 60)
    drafted = {}
    for name, policy in (("whole", WHOLE), ("usual", PolicySection())):
        drafter = create(section, ModelSection(path=str(tiny_folder), dtype="float64"), 2048)
        async with target(tiny_folder, policy) as rig, drafting(drafter) as peers, local_link(rig, peers):
            drafted[name] = [piece.drafted for piece in (await rig.answer(request))[1:-5]]
    assert set(drafted["whole"]) == {16}
    assert 0 in drafted["usual"], "the policy never gave up, so nothing was shown"
