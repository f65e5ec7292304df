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


def shared_links(config: LaunchConfig, topology: Topology, site: str) -> SharedLinks:
    """As workers at ``site`` see them. Every worker of another site is behind the link between the two, declared or not."""
    behind = {place.name: "-".join(sorted((site, place.site))) for place in topology.workers if place.site != site}
    rules = {}
    for place in topology.workers:
        if place.name in behind:
            link = config.link(site, place.site)
            given = LinkRules() if link is None else LinkRules(link.schedule, link.aged_turn, link.background_after_s)
            rules[behind[place.name]] = given
    return SharedLinks(rules, behind)
