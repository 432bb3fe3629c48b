# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether root's rights are to be had, where sudo wants a password: one is given, or none (molecule:no_sudo gives wrong ones)."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results

# Like sudo for somebody whose password is `right`; it gives no rights, only an `id` that says so.
SUDO = """#!/bin/sh
prompt=
while :; do
  case $1 in
    -p) prompt=$2; shift 2 ;;
    -u) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ -n "$prompt" ] || { echo "sudo: a password is required" >&2; exit 1; }
printf '%s' "$prompt" >&2
read -r given
[ "$given" = right ] || exit 1
PATH=@FOLDER@:$PATH exec "$@"
"""


@pytest.fixture
def rights(tmp_path):
    """`rights(password)` plays the tasks on a host, and returns Ansible's account."""
    sudo, who = tmp_path / "sudo", tmp_path / "id"
    sudo.write_text(SUDO.replace("@FOLDER@", str(tmp_path)))
    who.write_text("#!/bin/sh\necho 0\n")
    sudo.chmod(0o755)
    who.chmod(0o755)

    def play(password=None):
        # If the tests run as root, Ansible would skip sudo.
        plan = Play(tmp_path, ["desk"], {"data": {"id": "none"}}, {"ANSIBLE_BECOME_ALLOW_SAME_USER": "1"})
        plan.variables = {
            "ansible_become_exe": str(sudo),
            **({} if password is None else {"ansible_become_password": password}),
        }
        return plan.run("plan:rights")

    return play


def kept(account) -> dict[str, str]:
    return {
        host: result["ansible_facts"]["ddp_rights"]
        for host, result in results(account, "Record whether this user has root rights").items()
    }


def test_field_38_a_password_that_nobody_gave_is_no_failure_and_looks_like_none(rights):
    account = rights()
    assert kept(account) == {"desk": "none"}
    told = results(account, "Test the password for root")["desk"]
    assert (told["rights"], told["refused"]) == ("none", "") and not told.get("failed")
    assert messages(account) == []
    for what in ("failures", "ignored", "rescued", "unreachable", "changed"):
        assert counts(account, what) == {"desk": 0}, what


def test_field_38_the_right_password_is_used(rights):
    account = rights("right")
    assert kept(account) == {"desk": "password"}
