# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The text of a plan, line by line."""

from __future__ import annotations

import shlex

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import rank_environ, torchrun_argv
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import by_hand, render
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts


def test_the_command_by_hand_fits_a_terminal_and_is_what_torchrun_takes():
    plan = make_plan(hosts({})).plan
    told = by_hand(plan)
    assert max(map(len, told.splitlines())) <= 80
    head, enter, prepare, *command, others = told.splitlines()
    assert (head, others) == (
        "By hand, without Ansible, on desktop:",
        "The other hosts have their own --node-rank and paths.",
    )
    assert (
        enter == "  cd /home/lzw/nanochat-ddp/trainer" and prepare == "  set -a; . /home/lzw/nanochat-ddp/runs/d4/env"
    )
    assert shlex.split(" ".join(line.rstrip("\\") for line in command)) == torchrun_argv(plan, plan["nodes"][0])
    for node in plan["nodes"]:
        words, environ = torchrun_argv(plan, node), rank_environ(plan, node)
        cut = words.index("--max-restarts=0") + 1
        # Without --, torchrun would take the flags for abbreviations of its own.
        assert [words[0], *(word for word in words[cut:] if word != "--")] == node["argv"]
        assert {f"--node-rank={environ['RANK']}", f"--nnodes={environ['WORLD_SIZE']}"} < set(words[:cut])


@pytest.mark.parametrize("settings", [{}, {"ddp_profile": "real"}, {"ddp_restarts": 3, "ddp_survive_reboot": True}])
def test_a_plan_in_brief_fits_a_screen_and_says_what_changes(settings):
    outcome = make_plan(hosts(settings))
    lines = render(outcome.plan, outcome.text_bytes, whole=False).splitlines()
    # The display adds its own line above and below, and indents by two; an address of the web is not broken.
    assert len(lines) <= 22 and all(len(line) <= 78 or "https://" in line for line in lines)
    told = " ".join(" ".join(lines).split())
    for part in (
        "desktop: /home/lzw/nanochat-ddp (about",
        "1.6 GB of disk",
        "active firewalls: port 29500",
        "open to the peers only",
        "may be away",
    ):
        assert part in told, part
    assert ("start after a reboot" in told) is bool(settings)
