# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts leave a run in every way there is, and come back: seconds until training continues, and steps that were lost.

The tests are one story in their order: each begins with the run as the one before has left it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from trio import HOSTS, PATIENCE, RUN, Trio, wait_for

ALL = tuple(HOSTS)
SAVE_EVERY = 200


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    made = Trio(tmp_path_factory.mktemp("trio"))
    yield made
    path = os.environ.get("MEMBERSHIP_RESULTS")
    if path:
        Path(path).write_text(json.dumps(made.table, indent=1) + "\n")
    print()
    for row in made.table:
        print("| {what} | {seconds} s | {steps lost} of {of} |".format(**row))


def test_a_host_that_joins_anew(trio):
    trio.play("-e", "watch=false", target="desktop,laptop")
    trio.train_together("desktop", "laptop")
    joins = "a host joins that the inventory did not have (train.yml)"
    trio.happen(joins, lambda: trio.play("-e", "watch=false"), *ALL)


def test_a_second_play_changes_nothing(trio):
    assert "changed=0" in trio.play("-e", "watch=false", "--tags", "launch")


def test_field_35_kill_9_of_a_rank(trio):
    trio.happen("kill -9 of a rank", lambda: trio.on("laptop", f"kill -9 {trio.pid('laptop')}"), *ALL)


def test_field_35_a_host_that_freezes_is_done_without_and_comes_back(trio):
    trio.happen("a host freezes", lambda: trio.freeze("laptop"), "desktop", "attic")
    assert "laptop left at" in trio.play(playbook="status", target="desktop,attic")
    trio.happen("it wakes up", lambda: trio.wake("laptop"), *ALL)
    assert ", back at" in trio.play(playbook="status")


def test_field_35_a_link_that_is_cut_in_one_direction(trio):
    # Each of the two is enough with the laptop.
    trio.happen("a link is cut in one direction", lambda: trio.cut("attic", "desktop"), "desktop", "laptop")
    trio.happen("it is whole again", lambda: trio.repair("attic"), *ALL)


def test_field_35_the_master_reboots(trio):
    off = "the master is switched off"
    trio.happen(off, lambda: trio.power_off("desktop"), "laptop", "attic", witness="laptop")
    # Nobody types anything: a unit of the user's own systemd starts its keeper.
    trio.happen("it boots, and takes part again by itself", lambda: trio.boot("desktop"), *ALL, witness="laptop")


def test_field_35_a_host_that_is_shut_down_in_order_comes_back_by_itself(trio):
    trio.happen("a host is shut down", lambda: trio.shut_down("laptop"), "desktop", "attic")
    trio.happen("it boots, and takes part again by itself (laptop)", lambda: trio.boot("laptop"), *ALL)


def test_field_35_a_keeper_that_is_killed_is_started_again(trio):
    begun = time.time()
    keeper = json.loads(trio.read("attic", "session.json"))["child_pid"]
    trio.on("attic", f"kill -9 {keeper}")
    wait_for("another keeper", lambda: trio.keeper_started("attic") > begun, PATIENCE)
    trio.train_together(*ALL)
    trio.note("kill -9 of a keeper", begun, "desktop")


def test_field_35_short_absences_end_nothing(trio):
    # More than ddp_restarts in an hour, with those of the tests before.
    for dummy in range(3):
        trio.freeze("laptop")
        time.sleep(12)
        trio.wake("laptop")
        trio.train_together(*ALL)


def test_field_35_a_split_of_two_and_its_healing(trio):
    trio.play(playbook="leave", target="attic")
    trio.train_together("desktop", "laptop")

    def split() -> None:
        trio.cut("desktop", "laptop")
        trio.cut("laptop", "desktop")

    # With ddp_min_hosts 1 each goes on by itself.
    trio.happen("two hosts are split, and each goes on", split, "desktop")
    trio.train_together("laptop")
    begun = time.time()
    trio.repair("desktop")
    trio.repair("laptop")
    trio.train_together("desktop", "laptop")
    winner = max(
        ("desktop", "laptop"),
        key=lambda host: max(step["step"] for step in trio.events(host, "step") if step["time"] < begun),
    )
    trio.note("they meet again", begun, winner)
    joins = "a host that was taken out by hand is let in"
    trio.happen(joins, lambda: trio.play(playbook="join", target="attic"), *ALL)


def test_a_host_that_was_off_during_a_stop_does_not_begin_again(trio):
    trio.power_off("attic")
    trio.train_together("desktop", "laptop")
    trio.play(playbook="stop", target="desktop,laptop")
    begun = time.time()
    trio.boot("attic")
    # Its keeper starts by itself, and begins nothing, as it cannot know that the others were stopped.
    wait_for("the keeper of the attic", lambda: trio.keeper_started("attic") > begun, PATIENCE)
    time.sleep(20)
    assert trio.members("attic")[0] == "idle"
    # From here on as from any state: all go on together.
    trio.play("-e", "watch=false", "--tags", "restart")
    trio.train_together(*ALL)


def test_in_the_end_all_have_the_same_weights_and_a_loss_like_that_of_an_undisturbed_run(trio):
    trio.play(playbook="stop")
    ends = [trio.events(host, "end")[-1] for host in HOSTS]
    assert [end["reason"] for end in ends] == ["stopped"] * 3
    digests = {trio.events(host, "digest")[-1]["digest"] for host in HOSTS}
    assert len(digests) == 1
    step = trio.events("desktop", "step")[-1]["step"]
    trio.play("-e", "watch=false", ddp_run="whole")
    trio.wait_for_step("whole", step)
    trio.play(playbook="stop", ddp_run="whole")
    whole = {event["step"]: event["loss_smooth"] for event in trio.events("desktop", "step", "whole")}
    disturbed = trio.events("desktop", "step", RUN)[-1]["loss_smooth"]
    print(f"smooth loss at step {step}: {disturbed:.4f}, undisturbed {whole[step]:.4f}")
    # Both have read the little text many times by then, and each other parts of it more often.
    assert abs(disturbed - whole[step]) < 0.15 * whole[step]


def test_what_was_lost_is_no_more_than_a_save_interval(trio):
    assert trio.table
    assert all(row["steps lost"] <= SAVE_EVERY for row in trio.table), trio.table
