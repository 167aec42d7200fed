"""Options: what ``--additional-config '{"slipstream": {...}}'`` may say.

It knows nothing about engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from slipstream.base.config import Listen, Peers, PolicySection, TargetSection, TlsSection
from slipstream.base.errors import ConfigError

HINT = """name the draft services, as in --additional-config '{"slipstream": {"drafts": ["draft:8052"]}}'"""


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))
class Options:
    """See docs/ENGINES.md."""

    drafts: Peers
    deadline_s: Annotated[float, Field(gt=0, le=60)] = 0.25  # a step never waits longer for a draft
    prompt_lookup: bool = True
    always: bool = False  # draft, whether it pays or not
    layers: tuple[int, ...] = ()  # layers whose states drafts may read, as ``FeatureSpec.layers``
    features_gb: Annotated[float, Field(gt=0, le=1 << 20)] = 1.0  # GiB of memory for these states
    keyed: bool = True  # see ``sampling``
    metrics_listen: Listen | None = None  # address of a page with this process's metrics; None: no page
    tls: TlsSection = TlsSection()  # with drafts, as wire.tls; none: plain text
    kubeconfig: str = ""  # as wire.kubeconfig

    @staticmethod
    def of(config: Any) -> Options:
        """The options in ``config``, a mapping or None. Raises ConfigError naming the field."""
        if not isinstance(config, Mapping) or not config.get("drafts"):
            raise ConfigError(f"slipstream.drafts: {HINT}")
        names = {field.name for field in fields(Options)}
        if unknown := set(config) - names:
            raise ConfigError(f"slipstream.{min(map(str, unknown))}: not known; use one of {', '.join(sorted(names))}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                  for name, value in config.items()}
        try:
            return Options(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"slipstream.{'.'.join(map(str, first['loc']))}: "
                              f"{first['msg'].removeprefix('Value error, ')}") from error

    def section(self, most: int) -> TargetSection:
        """The options as settings of a target. most: longest chain. Raises ConfigError."""
        try:
            policy = PolicySection(max_nodes=most, deadline_max_s=self.deadline_s, always=self.always)
        except ValidationError as error:
            raise ConfigError(f"num_speculative_tokens: {error.errors()[0]['msg']}") from error
        return TargetSection(drafts=self.drafts, prompt_lookup=self.prompt_lookup, policy=policy)
