"""Two hosts without root rights: the commands that only their owner can run are printed, and everything else works."""

from __future__ import annotations

import json
import re

import pytest

HOSTS = ["desktop", "laptop"]
# The tests tell one story and are played in this order.


@pytest.fixture(scope="module")
def wall(lab):
    """The owner of the laptop has a firewall; its rules before the job."""
    lab.on("laptop", "ufw allow 22/tcp && ufw --force enable")
    return rules(lab)


def rules(lab):
    return lab.on("laptop", "nft -s list ruleset; cat /etc/ufw/user.rules /etc/ufw/user6.rules")


def commands(said):
    """The commands for the owner of the host, as a person would copy them."""
    found = re.findall(r"(sudo [^\n;]*[^\n; ])", said)
    assert found, said
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def owner_was_told(lab, wall):
    return lab.play("-e", f"preflight_file={lab.kept}/findings.json", playbook="preflight", code=2)


def test_field_02_preflight_names_the_commands_for_the_owner(lab, wall, owner_was_told):
    found = json.loads((lab.kept / "findings.json").read_text())["findings"]
    (told,) = [one for one in found if one["code"] == "no-sudo"]
    assert told["host"] == "laptop"
    assert "sudo ufw" in told["remedy"]
    assert "10.89.76.11" in told["remedy"]
    assert told["remedy"] in owner_was_told
    assert rules(lab) == wall


def test_a_password_that_gives_no_root_is_said_once_and_not_asked_for_again(lab, wall):
    """On the laptop it is the user's, who has no sudo; on the desktop it is wrong."""
    lab.on("laptop", "echo xiaoxin:known | chpasswd")
    password = lab.kept / "password"
    password.write_text("known\n")
    said = lab.play("--become-password-file", str(password), playbook="preflight", code=2)
    without = "goes on without root: the password that was given does not work there"
    assert f"laptop {without} (xiaoxin is not in the sudoers file)." in said
    assert f"desktop {without} (Incorrect sudo password)." in said
    assert said.count("goes on without root") == 2
    assert (
        "does not work there (xiaoxin is not in the sudoers file); its owner can open them on laptop: sudo ufw" in said
    )
    assert "-K" not in said and "host-down" not in said
    assert rules(lab) == wall


def test_field_02_training_says_the_same_and_starts_nothing(lab, wall):
    said = lab.play(code=2)
    assert "no-sudo" in said
    assert "10.89.76.11" in said
    assert rules(lab) == wall
    assert lab.states() == {"desktop": "absent", "laptop": "absent"}


def test_field_02_once_the_owner_did_so_it_trains(lab, wall, owner_was_told):
    for command in commands(json.loads((lab.kept / "findings.json").read_text())["findings"][0]["remedy"]):
        lab.on("laptop", command)
    assert rules(lab) != wall
    said = lab.play()
    assert "weights identical on both ranks" in said
    # All is open, so there is nothing to ask anybody for.
    assert "sudo ufw" not in said and "no root here" not in said and "-K" not in said
    assert lab.states() == {"desktop": "finished", "laptop": "finished"}


def test_the_owner_is_not_asked_again_for_the_keepers(lab, wall):
    lab.play(
        "-e", "ddp_restarts=1", "-e", "ddp_run=kept", "-e", f"preflight_file={lab.kept}/kept.json", playbook="preflight"
    )
    found = json.loads((lab.kept / "kept.json").read_text())
    assert not [one for one in found["findings"] if one["severity"] == "error"]


def test_field_02_reset_names_the_commands_that_close_again(lab, wall):
    said = lab.play(playbook="reset")
    for command in commands(said):
        lab.on("laptop", command)
    assert rules(lab) == wall
