# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a guest leaves and comes back; membership_world.py combines that with all other faults."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import presence
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.tests.integration.local import until

RULES = m.Rules(("desktop", "laptop"), 1, 1.0, 1.0)
BATTERY = "on battery; back when plugged in"
# A session at the screen, as loginctl of systemd 252 says it.
AT_IT = "Name=lzw\nClass=user\nIdleHint=no\nLockedHint=no"
LOGINCTL = """#!/bin/sh
case "$1 $2" in
    "show-seat seat0") cat "$NANOCHAT_MACHINE/seat" ;;
    "show-session 2") cat "$NANOCHAT_MACHINE/session" ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a laptop that the command of ours looks at, with a mouse and nobody at its screen."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/loginctl").write_text(LOGINCTL)
    (tmp_path / "bin/loginctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("NANOCHAT_MACHINE", str(tmp_path))
    (tmp_path / "seat").write_text("\n")
    supply(tmp_path, "hidpp_battery_0", status="Discharging", online="1")
    return tmp_path


def supply(laptop: Path, name: str, **facts: str) -> None:
    folder = laptop / "sys/class/power_supply" / name
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in facts.items():
        (folder / key).write_text(value + "\n")


def guest(monkeypatch: pytest.MonkeyPatch, hours: str | None = None) -> presence.Attendance:
    """A guest whose commands said nothing yet, and are not asked again."""
    monkeypatch.setattr(presence, "ASK_SECONDS", 1e6)
    monkeypatch.setattr(presence, "IN_USE", "false")
    return presence.Attendance({"hours": hours, "away_if": None})


def test_a_laptop_that_is_unplugged_is_away(laptop: Path) -> None:
    assert presence.reason(presence.IN_USE) == ""
    supply(laptop, "BAT1", status="Discharging")
    supply(laptop, "AC", online="0")
    assert presence.reason(presence.IN_USE) == BATTERY
    # A weak charger: plugged in, though the battery loses charge.
    supply(laptop, "ucsi-source-psy-USBC000:001", online="1")
    assert presence.reason(presence.IN_USE) == ""


@pytest.mark.parametrize(
    ("session", "why"),
    [
        (AT_IT, "used by lzw; back when it is left alone"),
        (AT_IT.replace("IdleHint=no", "IdleHint=yes"), ""),
        (AT_IT.replace("LockedHint=no", "LockedHint=yes"), ""),
        (AT_IT.replace("=user", "=greeter").replace("lzw", "gdm"), ""),
    ],
)
def test_a_machine_whose_screen_somebody_uses_is_away(laptop: Path, session: str, why: str) -> None:
    (laptop / "session").write_text(session)
    assert presence.reason(presence.IN_USE) == ""  # logged in, and another one is in the foreground
    (laptop / "seat").write_text("2\n")
    assert presence.reason(presence.IN_USE) == why
    (laptop / "bin/loginctl").write_text("#!/bin/sh\necho no such service >&2\nexit 1\n")
    assert presence.reason(presence.IN_USE) == ""


def test_a_command_says_why_in_its_first_line_and_has_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert presence.reason("printf 'too \\033hot\\nand more'") == "too hot"
    assert len(presence.reason("printf 'x%09999d' 1")) == presence.LONGEST
    for command in ("true", "echo 12345"):
        assert presence.reason(command) == "ddp_away_if says so; back when it does not"
    assert [presence.reason(command) for command in ("echo no; false", "/nowhere")] == ["", ""]
    # A command that hangs is no reason to leave.
    monkeypatch.setattr(presence, "SECONDS", 0.1)
    assert presence.reason(f"sleep 60 & echo $! > {tmp_path}/pid; wait") == ""
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not processes.alive(pid, None))


class Clock:
    """A clock whose sleeps are short, until it stops for good; the cores of another program are busy meanwhile."""

    def __init__(self, laptop: Path) -> None:
        self.stat, self.now, self.cores, self.spent = laptop / "proc/stat", 0.0, 0.0, 0.0
        self.stat.parent.mkdir()
        self.over, self.asleep = threading.Event(), threading.Event()
        self.localtime = time.localtime
        self.tick()

    def tick(self) -> None:
        ticks = int(self.spent * os.sysconf("SC_CLK_TCK"))
        self.stat.write_text(f"cpu  {ticks} {int(self.now * 900)} 0 0 0 0 0 0 0 0\ncpu0 1 0 0 0\n")

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.over.wait(0.01):
            self.asleep.set()
            time.sleep(1e6)
        self.now += seconds
        self.spent += seconds * self.cores
        self.tick()


@pytest.fixture
def clock(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock(laptop)
    monkeypatch.setattr(presence, "time", made)
    yield made
    made.over.set()
    assert made.asleep.wait(10)


def test_a_guest_asks_both_commands_every_few_seconds(laptop: Path, clock: Clock) -> None:
    one = presence.Attendance({"hours": None, "away_if": f"test -e {laptop}/away"})
    assert one.look(0.0, False) == ""
    (laptop / "away").touch()
    until(lambda: one.look(0.0, False).startswith("ddp_away_if"))
    (laptop / "away").unlink()
    supply(laptop, "BAT1", status="Discharging")
    until(lambda: one.look(1.0, False) == BATTERY)


def test_a_guest_leaves_while_other_programs_are_busy(clock: Clock) -> None:
    one = presence.Attendance({"hours": None, "away_if": None})

    def looks(cores: float) -> str:
        clock.cores, until_then = cores, clock.now + 30
        until(lambda: clock.now > until_then)
        return one.busy

    # The rank of a guest, which is polite, counts for nothing.
    assert looks(0.0) == looks(0.4) == ""
    busy = looks(1.5)
    assert busy == one.look(0.0, False) == "other programs use 1.5 cores; back below 0.25"
    assert looks(0.3) and one.look(1.0, False) == busy
    assert looks(0.2) == ""


@pytest.mark.parametrize(
    ("hours", "inside"), [("22:00-07:00", (22, 23, *range(7))), ("08:00-10:00", (8, 9)), ("00:00-00:00", range(24))]
)
def test_hours_may_cross_midnight(hours, inside):
    assert {hour for hour in range(24) if presence.within(hours, 60 * hour)} == set(inside)


def test_a_guest_is_away_outside_of_its_hours(monkeypatch):
    one = guest(monkeypatch, "22:00-07:00")
    monkeypatch.setattr(presence, "within", lambda hours, minute: False)
    assert one.look(0.0, False) == "outside of 22:00-07:00; back at 22:00"
    # A user's join overrules the hours, but not what comes up later.
    assert one.look(1.0, True) == one.look(2.0, False) == ""
    one.used = BATTERY
    assert one.look(3.0, False) == BATTERY


def test_a_guest_leaves_at_once_and_comes_back_after_a_quiet_minute(monkeypatch):
    one = guest(monkeypatch)
    one.used = BATTERY
    assert one.look(0.0, False) == BATTERY
    one.used = ""
    assert one.look(59.0, False) == "quiet again; back after a minute of it"
    assert one.look(61.0, False) == ""
    for now in range(100, 700, 10):
        one.used = BATTERY if now % 20 == 0 else ""
        assert one.look(now, False)


def test_who_lets_a_guest_in_by_hand_overrules_the_reason_as_long_as_it_lasts(monkeypatch):
    one = guest(monkeypatch)
    one.used = BATTERY
    assert one.look(0.0, False) == BATTERY
    assert one.look(1.0, True) == one.look(2.0, False) == ""
    one.used = "used by eve; back when it is left alone"
    assert one.look(3.0, False) == one.used
    one.used = ""
    assert one.look(70.0, False) == ""
    one.used = BATTERY
    assert one.look(71.0, False) == BATTERY


def test_a_reason_keeps_its_figure_from_when_the_guest_left(monkeypatch):
    one = guest(monkeypatch)
    one.used = "91 degrees"
    assert one.look(0.0, False) == "91 degrees"
    one.used = "95 degrees"
    assert one.look(10.0, False) == "91 degrees"
    assert one.look(11.0, True) == ""
    one.used = "93 degrees"
    assert one.look(20.0, False) == ""
    one.used = "12"
    assert one.look(30.0, False) == "12"


MINE = m.Generation(2, ("desktop", "laptop"))


def test_a_guest_that_leaves_in_the_middle_of_a_start_is_not_waited_for():
    own = m.OwnState(m.KeeperState("desktop", m.TRAINING, generation=MINE, promised=2, last=MINE), since=0.0)
    public = m.KeeperState("laptop", m.RESTING, promised=2, last=m.Generation(1, MINE.members), why="used")
    own, order = m.decide(RULES, own, {"laptop": m.Received(public, 1.0, 0.0)}, 1.0)
    assert (own.public.state, own.public.why, order) == (m.ENDING, "laptop: used", m.SAVE)
