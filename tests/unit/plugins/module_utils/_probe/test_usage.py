# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a machine is used, by what its files and commands say: a laptop in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import usage
from ansible_collections.nanochat.ddp.tests.integration.local import until

AT_IT = {
    "Name": "lzw",
    "Class": "user",
    "Type": "wayland",
    "Seat": "seat0",
    "Remote": "no",
    "State": "active",
    "IdleHint": "no",
}
# Two logins and a login screen, as loginctl of systemd 252 says it.
LOGINCTL = """Name=lzw
Class=user
Type=wayland
Seat=seat0
Remote=no
State=active
IdleHint=no
LockedHint=no

Name=lzw
Class=user
Type=tty
Seat=
Remote=yes
State=active
IdleHint=no
LockedHint=no

Name=gdm
Class=greeter
Type=wayland
Seat=seat0
Remote=no
State=online
IdleHint=no
LockedHint=no
"""


def supply(root: Path, name: str, **facts: str) -> None:
    folder = root / "sys/class/power_supply" / name
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in facts.items():
        (folder / key).write_text(value + "\n")


def answering(answers: dict[str, tuple[int, str]]) -> usage.Run:
    """Commands by their second word; any other is not installed."""
    return lambda argv: (*answers.get(argv[1], (127, "")), "")


@pytest.mark.parametrize(
    ("change", "users"),
    [
        ({}, ("lzw",)),
        ({"Type": "tty"}, ("lzw",)),
        ({"IdleHint": "yes"}, ()),
        ({"LockedHint": "yes"}, ()),
        ({"State": "online"}, ()),
        ({"Type": "tty", "Seat": "", "Remote": "yes"}, ()),
    ],
)
def test_who_sits_at_a_machine(change, users):
    assert usage.at_work([{**AT_IT, **change}]) == users


def test_a_machine_without_a_battery_is_not_on_battery(tmp_path: Path) -> None:
    assert usage.charge(str(tmp_path)) is None
    supply(tmp_path, "mouse", type="Battery", scope="Device", status="Discharging", capacity="7")
    assert usage.charge(str(tmp_path)) is None


def test_a_laptop_that_is_unplugged_tells_its_charge(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="64")
    supply(tmp_path, "AC", type="Mains", online="0")
    assert usage.charge(str(tmp_path)) == 64
    # A weak charger: plugged in, though the battery loses charge.
    supply(tmp_path, "usb", type="USB", online="1")
    assert usage.charge(str(tmp_path)) is None


def test_load_counts_programs_of_normal_priority():
    before, now = (
        usage.ticks(f"cpu  {user} {nice} 0 {idle} 0 0 0 0 0 0\ncpu0 1\ncpu1 1\n")
        for user, nice, idle in ((100, 0, 0), (160, 100, 40))
    )
    assert usage.load(before, now) == pytest.approx(0.6)
    assert usage.load(None, now) is usage.load(now, now) is usage.ticks("") is None


def test_a_machine_is_read_as_a_whole(tmp_path: Path) -> None:
    answers = {"list-sessions": (0, "2 1000 lzw seat0\n5 1000 lzw\nc1 42 gdm seat0\n"), "show-session": (0, LOGINCTL)}
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="64")
    found = usage.UsageMeter(None, str(tmp_path), answering(answers)).read()
    assert found._replace(minute=0) == usage.Reading(users=("lzw",), charge=64)


def test_a_host_says_what_it_cannot_see() -> None:
    assert usage.facts(answering({})) == {"graphical": [], "blind": ["who uses it (no logind)"]}
    seeing = {"list-sessions": (0, "2 1000 lzw\n"), "show-session": (0, LOGINCTL)}
    assert usage.facts(answering(seeing)) == {"graphical": ["lzw"], "blind": []}


def test_the_owners_command_says_away_and_is_not_asked_every_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = usage.UsageMeter(f"echo x >> {tmp_path}/asked; test -e {tmp_path}/away", str(tmp_path))
    (tmp_path / "away").touch()
    assert meter.read().away_if and meter.read().away_if
    assert (tmp_path / "asked").read_text() == "x\n"
    (tmp_path / "away").unlink()
    monkeypatch.setattr(usage, "AWAY_IF_SECONDS", 0.0)
    assert not meter.read().away_if
    # A command that hangs is no reason to leave.
    monkeypatch.setattr(usage, "SECONDS", 0.1)
    assert not usage.UsageMeter(f"sleep 60 & echo $! > {tmp_path}/pid; wait", str(tmp_path)).read().away_if
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not processes.alive(pid, None))


def test_a_command_that_hangs_or_is_missing_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "SECONDS", 0.1)
    assert [usage.run(argv)[:2] for argv in (["sleep", "60"], ["/nowhere"], ["echo", "x"])] == [(127, "")] * 2 + [
        (0, "x\n")
    ]
