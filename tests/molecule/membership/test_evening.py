# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An evening at home: of three guests one is unplugged, one is used, and of one its owner's command says away; later all are back, and
nothing is lost.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

from storm_account import from_scratch, rows_of_steps, surviving
from trio import HOSTS, PATIENCE, Trio, wait_for

ALL = tuple(HOSTS)
ROWS = 12  # of a step
MACHINE = "/opt/machine"
# Laptops that the test plays: their files are in a folder.
SETTINGS = {
    "ddp_polite": "guest", "ddp_away_if": f"test -e {MACHINE}/game", "ddp_extra_env": {"NANOCHAT_MACHINE": MACHINE},
    "ddp_save_every": 100, "ddp_survive_reboot": False,
}  # fmt: skip
# Answers for the sessions of a test, and passes on everything else.
LOGINCTL = f"""#!/bin/sh
case "$1 $2" in
    "show-seat seat0") if [ -s {MACHINE}/session ]; then echo 2; fi ;;
    "show-session 2") cat {MACHINE}/session ;;
    *) exec /usr/bin/loginctl "$@" ;;
esac
"""
SESSION = "\n".join(["Name=owner", "Class=user", "IdleHint=no", "LockedHint=no"])
BATTERY, GAME = f"{MACHINE}/sys/class/power_supply/BAT0", f"{MACHINE}/game"
# How each owner needs the machine, takes that back, and what the status says meanwhile.
NEEDS = {
    "laptop": (
        f"echo Discharging > {BATTERY}/status",
        f"echo Charging > {BATTERY}/status",
        "on battery; back when plugged in",
    ),
    "attic": (f"touch {GAME}", f"rm -f {GAME}", "ddp_away_if says so; back when it does not"),
    "desktop": (
        f"echo '{SESSION}' > {MACHINE}/session",
        f": > {MACHINE}/session",
        "used by owner; back when it is left alone",
    ),
}


def be_a_laptop(trio: Trio, host: str) -> None:
    trio.on(host, f"mkdir -p {BATTERY}")
    trio.on(host, f"cat > /usr/local/bin/loginctl <<'END'\n{LOGINCTL}END\nchmod 755 /usr/local/bin/loginctl")
    for dummy, undo, dummy_words in NEEDS.values():
        trio.on(host, undo)


def seconds_to_leave(trio: Trio, host: str) -> float:
    """From the owner's need to the end of the rank, which has saved."""
    trio.on(host, NEEDS[host][0])
    since = time.time()
    wait_for(f"{host} to be away", lambda: trio.members(host)[0] == "resting", PATIENCE)
    end = trio.events(host, "end")[-1]
    assert (end["reason"], end["time"] > since) == ("stopped", True), end
    print(f"{host} left {end['time'] - since:.1f} s after: {NEEDS[host][2]}")
    return float(end["time"] - since)


def test_an_evening(tmp_path: Path) -> None:
    trio = Trio(tmp_path, "evening", **SETTINGS)
    for host in HOSTS:
        be_a_laptop(trio, host)
    trio.play("-e", "watch=false")
    trio.train_together(*ALL)
    assert trio.on("laptop", f"ps -o cls=,ni= -p {trio.pid('laptop')}").split() == ["IDL", "-"]
    # One after the other, until nobody trains.
    assert seconds_to_leave(trio, "laptop") < 10
    trio.train_together("desktop", "attic")
    seconds_to_leave(trio, "attic")
    trio.train_together("desktop")
    seconds_to_leave(trio, "desktop")
    status = trio.play(playbook="status")
    for host, (dummy, dummy_undo, words) in NEEDS.items():
        assert f"{host}: away since " in status and f", {words}" in status, status
    for host, (dummy, undo, dummy_words) in NEEDS.items():
        trio.on(host, undo)
    trio.train_together(*ALL)
    a_plug_that_flaps(trio)
    by_hand(trio)
    trio.play(playbook="stop")
    judge(trio)
    for host in HOSTS:
        trio.on(host, "rm /usr/local/bin/loginctl")


def judge(trio: Trio) -> None:
    """The promises of docs/membership.md: nothing from scratch, each row of a step once, the same weights."""
    ends = [trio.events(host, "end")[-1] for host in HOSTS]
    assert [end["reason"] for end in ends] == ["stopped"] * 3, ends
    assert len({trio.events(host, "digest")[-1]["digest"] for host in HOSTS}) == 1
    told = {host: [json.loads(line) for line in trio.metrics(host)] for host in HOSTS}
    assert not any(map(from_scratch, told.values()))
    rows = rows_of_steps({host: surviving(events) for host, events in told.items()})
    assert sorted(rows) == list(range(len(rows))), "steps are missing"
    assert set(rows.values()) == {ROWS}


def a_plug_that_flaps(trio: Trio) -> None:
    """A battery that comes and goes for twenty seconds makes the run regroup once there and once back."""
    generations = len(trio.events("desktop", "start"))
    for dummy in range(10):
        trio.on("laptop", NEEDS["laptop"][0])
        time.sleep(1)
        trio.on("laptop", NEEDS["laptop"][1])
        time.sleep(1)
    trio.train_together(*ALL)
    assert len(trio.events("desktop", "start")) <= generations + 2


def by_hand(trio: Trio) -> None:
    """Join wins over the battery, leave over a host that would come back by itself."""
    seconds_to_leave(trio, "laptop")
    trio.train_together("desktop", "attic")
    trio.play(playbook="join", target="laptop")
    trio.train_together(*ALL)
    trio.play(playbook="leave", target="laptop")
    trio.on("laptop", NEEDS["laptop"][1])
    trio.train_together("desktop", "attic")
    trio.play(playbook="join", target="laptop")
    trio.train_together(*ALL)
