# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

from ansible_collections.nanochat.ddp.plugins.module_utils._run.members import (
    absences,
    membership_of,
    read_members,
    rests_since,
    steps_repeated,
)


def event(time, what, *members, why=""):
    return {"time": time, "what": what, "members": list(members), "why": why, "generation": 1}


def test_a_guest_is_away_since_it_left_whatever_it_said_since():
    story = [event(10.0, "training"), event(20.0, "resting"), event(30.0, "lost"), event(40.0, "resting")]
    assert rests_since(story) == 20.0
    assert rests_since([*story, event(50.0, "idle")]) is None


def test_who_is_lost_is_named_where_another_rank_only_died_of_it():
    story = [
        event(10.0, "training", "desktop", "laptop"),
        event(20.0, "idle", why="the rank of desktop died"),
        {**event(26.0, "lost", why="laptop is not heard any more"), "host": "laptop"},
        event(60.0, "training", "desktop"),
    ]
    [found] = absences(story)
    assert tuple(found.values()) == ("laptop", 20.0, "laptop is not heard any more", None, None)


def test_the_reason_of_a_state_is_not_that_of_a_later_event():
    events = [event(1.0, "failed", why="it died too often"), event(2.0, "lost", why="laptop is not heard any more")]
    # Its record is not collected.
    for record in ({**events[1], "state": "failed", "since": 2.0}, {}):
        found = membership_of(record, events, None, [], {})
        assert (found["state"], found["why"], found["since"]) == ("failed", "it died too often", 2.0)


def test_a_restart_with_all_hosts_is_no_absence():
    both = event(10.0, "training", "desktop", "laptop")
    assert absences([both, event(15.0, "idle", why="the rank of laptop died"), both]) == []


def test_steps_that_were_made_again():
    def start(step):
        return {"kind": "start", "resumed_from": step}

    steps = [{"kind": "step", "step": number} for number in range(10)]
    assert steps_repeated([start(None), *steps]) == 0
    assert steps_repeated([start(None), *steps, start(10), {"kind": "step", "step": 10}]) == 0
    assert steps_repeated([start(None), *steps, start(8), *steps[8:], start(9)]) == 3


def test_of_a_huge_file_only_the_newest_is_read(tmp_path):
    events = [{"time": float(number), "what": "idle"} for number in range(40_000)]
    (tmp_path / "members.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    found = read_members(str(tmp_path))
    assert 1000 < len(found) < 20_000 and found == events[-len(found) :]
