"""Three hosts that have little in common, and the controller, train one model; see tests/molecule/mixed/molecule.yml."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from lab import wait_for

HOME = {"attic": "/home/lzw", "cellar": "/home/xiao xin", "desk": "/home/xiaoxin"}
USER = {"attic": "lzw", "cellar": "xiaoxin", "desk": "xiaoxin"}
BASE = {host: f"{home}/nanochat-ddp" for host, home in HOME.items()} | {
    "here": f"{os.environ['MOLECULE_EPHEMERAL_DIRECTORY']}/here"
}
HOSTS = list(BASE)

# The tests tell one story and are played in this order.


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_on_this_machine():
    """Hosts that are containers go with what runs there; the rank on this machine has a session here."""
    yield
    subprocess.run(["tmux", "kill-session", "-t", f"=nanochat-mixed-rank{HOSTS.index('here')}"], check=False)


def on(lab, host, script, **words):
    if host != "here":
        return lab.on(host, script, **words)
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout


def events(lab, host, kind):
    lines = on(lab, host, f"cat '{BASE[host]}/runs/mixed/metrics-rank{HOSTS.index(host)}.jsonl'").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("host", "release", "shell", "python"),
    [("attic", "12", "fish", "3.11"), ("cellar", "12", "zsh", "3.11"), ("desk", "13", "bash", "3.13")],
)
def test_the_hosts_differ_as_they_are_meant_to(lab, host, release, shell, python):
    assert lab.on(host, "cat /etc/debian_version").startswith(f"{release}.")
    assert (
        lab.on(host, f"getent passwd {USER[host]}")
        .rstrip()
        .endswith(f":{HOME[host]}:/usr/bin/{shell}".replace("/usr/bin/bash", "/bin/bash"))
    )
    assert lab.on(host, "python3 --version").startswith(f"Python {python}.")


def test_the_ways_in_differ_as_they_are_meant_to(lab):
    assert "noexec" in lab.on("desk", "grep ' /tmp ' /proc/mounts")
    # With the key that the scenario's ssh settings name.
    direct = ["ssh", "-F", os.environ["TEST_SSH_CONFIG"], "-o", "BatchMode=yes"]
    for where in ("lzw@10.89.79.11", "xiaoxin@10.89.79.12", "xiaoxin@10.89.79.13"):
        assert subprocess.run([*direct, where, "true"], capture_output=True, check=False).returncode == 255, where


def test_all_train_one_model(lab):
    said = lab.play()
    assert "weights identical on all 4 ranks" in said
    for host in HOSTS:
        (end,) = events(lab, host, "end")
        assert (end["reason"], len(events(lab, host, "step"))) == ("finished", 20)
        assert events(lab, host, "digest")[-1]["identical"] is True
    assert len({events(lab, host, "digest")[-1]["digest"] for host in HOSTS}) == 1


def test_the_others_reach_the_controller_at_an_address_of_its_own(lab):
    (plan,) = {on(lab, host, f"cat '{BASE[host]}/runs/mixed/plan.json'") for host in HOSTS}
    (here,) = [node["address"] for node in json.loads(plan)["nodes"] if node["host"] == "here"]
    assert not here.startswith("127.") and here not in lab.on("desk", "hostname -I").split()


def test_restart_goes_on_from_the_checkpoints(lab):
    lab.play("--tags", "restart", "-e", "watch=false", "-e", "ddp_iterations=40")
    wait_for("the end", lambda: set(lab.states().values()) == {"finished"})
    for host in HOSTS:
        assert events(lab, host, "start")[-1]["resumed_from"] == 20
        assert events(lab, host, "step")[-1]["step"] == 39


def test_reset_leaves_nothing_that_runs(lab):
    lab.play("-e", "ddp_purge=all", playbook="reset")
    for host in HOSTS:
        assert on(lab, host, f"[ ! -e '{BASE[host]}' ] || find '{BASE[host]}' -type f | head") == ""
        words = {"user": USER[host]} if host in USER else {}
        assert "mixed" not in on(lab, host, "tmux list-sessions 2>/dev/null || true", **words)
