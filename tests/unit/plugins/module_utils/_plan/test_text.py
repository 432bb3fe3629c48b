# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The text of a plan, line by line."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import torchrun_argv
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import text
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import brief, by_hand, render, render_findings
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    nic,
    planned,
    route,
)


def training(**more: Any) -> dict[str, Any]:
    return {**planned()["training"], **more}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (9_999, "9999"),
        (10_000, "10.0k"),
        (999_000, "999k"),
        (1e6, "1.0M"),
        (2.5e9, "2.5G"),
        (1e12, "1.0T"),
        (3e15, "3.0P"),
    ],
)
def test_numbers_are_told_in_few_digits(number, said):
    assert text.human(number) == said


@pytest.mark.parametrize(
    ("way", "asked", "said"),
    [("exact", "auto", "exact (auto)"), ("int8", "int8", "int8"), ("upstream", "auto", "upstream")],
)
def test_a_way_that_was_left_open_is_marked(way, asked, said):
    assert text.sync({"sync": way, "asked": {"sync": asked}}) == said


def test_when_something_is_done_and_what_is_not_is_told():
    assert text.schedule(training(eval_every=1, sample_every=0, save_every=-1, save_minutes=0)) == (
        "evaluates every 1, no samples, saves at the end"
    )
    assert text.schedule(training(eval_every=0, sample_every=7, save_every=1, save_minutes=30)) == (
        "no evaluation, samples every 7, saves every 1 and every 30 minutes"
    )


def test_the_table_of_hosts_fits_a_terminal_and_shows_each_python():
    other = {"candidates": [{"executable": "/usr/bin/python3.13", "version": "3.13.5"}]}
    plan = planned({}, two={"python": {"version": "3.13.5", "venv": {}, **other}})
    head, one, two = text.node_table(plan)
    assert max(map(len, (head, one, two))) <= 80
    at = head.index("python")
    assert (one[at:].split()[0], two[at:].split()[0]) == ("3.11", "3.13")


def test_a_data_set_of_a_url_is_told_and_planned_by_it():
    plan = planned({"ddp_data_source": "url", "ddp_data_url": "https://example.org/shards/"})
    assert plan["data"]["url"] == "https://example.org/shards" and plan["data"]["names"]
    assert text.data_line(plan).endswith("the last for validation, from https://example.org/shards")
    assert planned()["data"]["url"] is None


def test_the_disk_that_the_python_takes_is_said():
    outcome = make_plan(hosts())
    assert "once on each machine: about 1.6 GB of disk more" in render(outcome.plan)


def test_field_15_the_text_says_how_big_it_is_before_anything_starts():
    outcome = make_plan(hosts({"ddp_profile": "real"}))
    text = render(outcome.plan)
    assert "125,829,354 parameters" in text and "20.5M tokens, 0.1628 per parameter, 5.6e+15 FLOPs" in text
    for part in ("enp4s0", "192.168.1.11", "29500"):
        assert part in text, part
    assert max(len(line) for line in text.splitlines()) < 200


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
    known = hosts(settings)
    for one in known:
        one["probe"]["folders"] = {
            "/books": {
                "path": "/books",
                "kind": "folder",
                "readable": True,
                "shards": 0,
                "tokenizer": False,
                "files": True,
                "text_bytes": size,
                "trainer": False,
            }
        }
    outcome = make_plan(known)
    shown = render(outcome.plan, outcome.text_bytes)
    assert [line.strip() for line in shown.splitlines() if "read your text" in line] == ([said] if said else [])
    # A text that grows is no reason to begin again.
    known[0]["probe"]["folders"]["/books"]["text_bytes"] = 7
    assert outcome.plan == make_plan(known).plan


def test_the_default_text_is_the_english_in_a_pythons_library():
    outcome = make_plan(hosts({"ddp_iterations": 700, "ddp_total_batch": 1024}))
    shown = render(outcome.plan, outcome.text_bytes)
    assert (
        "from the English in /usr/lib/python3.11 on desktop" in shown
        and "700 steps read the text about 1.9 times" in shown
    )


def test_field_25_the_text_says_who_is_on_the_radio():
    seen = {"nics": [nic("wlp3s0", "wifi", "192.168.1.11/24")], "routes": [route("x", "wlp3s0", "192.168.1.11")]}
    outcome = make_plan(hosts(two=seen))
    assert "WARNING nic-wifi laptop: wlp3s0 is a Wi-Fi interface." in render_findings(outcome.findings)


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
    lines = brief(outcome.plan, outcome.text_bytes).splitlines()
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
