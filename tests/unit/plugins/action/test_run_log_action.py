# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is said of more logs than can be followed at a time."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.action import run_log


def told(monkeypatch, hosts: int, forks: int) -> list[str]:
    """The warnings of all hosts."""
    warned: list[str] = []
    monkeypatch.setattr(run_log.display, "warning", warned.append)
    monkeypatch.setattr(run_log._configuration, "forks", lambda: forks)
    names = [f"host{number}" for number in range(hosts)]
    for name in names:
        run_log.tell_of_forks({"ansible_play_hosts": names, "inventory_hostname": name})
    return warned


def test_field_41_more_logs_than_forks_are_told_of_once_with_the_line_to_add(monkeypatch):
    (sentence,) = told(monkeypatch, hosts=8, forks=5)
    assert sentence.startswith(
        "Ansible works on 5 hosts at a time and the job has 8, so the rest are followed only after"
    )
    assert sentence.endswith("below [defaults]: forks = 8 (for once: --forks 8)")


def test_where_all_can_be_followed_nothing_is_said(monkeypatch):
    assert told(monkeypatch, hosts=5, forks=5) == []
