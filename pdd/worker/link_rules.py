"""Which of a worker's receivers are behind one link to another site, and how transfers there take turns: from the launch config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdd.config import LaunchConfig
from pdd.topology import Topology
from pddbridge.link_schedule import LinkRules


@dataclass(frozen=True)
class SharedLinks:
    """``rules`` by link; ``behind``: receivers that are reached over one, with its name. Others have a link each."""

    rules: Mapping[str, LinkRules] = field(default_factory=dict)
    behind: Mapping[str, str] = field(default_factory=dict)


def link_rules(config: LaunchConfig, site: str) -> dict[str, LinkRules]:
    """Of the links between ``site`` and every other one, declared or not, by link."""
    rules = {}
    for other in config.sites:
        if other != site:
            link = config.link(site, other)
            given = LinkRules() if link is None else LinkRules(link.schedule, link.aged_turn, link.background_after_s)
            rules[_name(site, other)] = given
    return rules


def shared_links(config: LaunchConfig, topology: Topology, site: str) -> SharedLinks:
    """As workers at ``site`` see them. Every worker of another site is behind the link between the two."""
    return SharedLinks(link_rules(config, site), {p.name: _name(site, p.site) for p in topology.workers if p.site != site})


def _name(site: str, other: str) -> str:
    return "-".join(sorted((site, other)))
