# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The text of a plan, line by line."""

from __future__ import annotations

import shlex

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import torchrun_argv
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import by_hand, render
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts


@pytest.mark.parametrize(
    ("size", "steps", "said"),
    [
        (24_000_000, 200, "200 steps read your text about 0.16 times"),
        (200_000, 50, "50 steps read your text about 4.9 times"),
        (200_000, 3000, "3000 steps read your text about 295 times: it will learn it by heart"),
        (None, 200, None),
    ],
)
def test_the_text_says_how_many_times_the_steps_read_an_own_text(size, steps, said):
    settings = {
        "ddp_data_source": "text",
        "ddp_data_paths": ["/books"],
        "ddp_total_batch": 4096,
        "ddp_iterations": steps,
        "ddp_vocab_size": 4096,
    }
    books = {"kind": "folder", "readable": True, "shards": 0, "tokenizer": False, "text_bytes": size}
    known = hosts(settings)
    for one in known:
        one["probe"]["folders"] = {"/books": dict(books)}
    outcome = make_plan(known)
    shown = render(outcome.plan, outcome.text_bytes)
    assert [line.strip() for line in shown.splitlines() if "read your text" in line] == ([said] if said else [])
    # A text that grows is no reason to begin again.
    known[0]["probe"]["folders"]["/books"]["text_bytes"] = 7
    assert outcome.plan == make_plan(known).plan


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
