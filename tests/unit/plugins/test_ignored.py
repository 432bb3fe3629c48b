# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A task that goes on where a host gives no answer must not end the play of all others without a word.

In a play with any_errors_fatal Ansible marks every host as failed when one is unreachable, also where ignore_unreachable says that
this is no error, and prints nothing. Only any_errors_fatal or ignore_errors of the task itself keep it from that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PATHS = sorted([*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/*.yml")])


def tasks(items):
    """All tasks of a file, those in blocks and plays too."""
    for item in items:
        yield item
        for name in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks"):
            yield from tasks(item.get(name) or [])


def ignoring(path):
    plays = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    fatal = path.parent.name == "tasks" or any(play.get("any_errors_fatal") for play in plays)
    return [task for task in tasks(plays) if task.get("ignore_unreachable")] if fatal else []


@pytest.mark.parametrize(
    "path", [path for path in PATHS if ignoring(path)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_host_that_gives_no_answer_does_not_end_the_others_without_a_word(path):
    for task in ignoring(path):
        assert task.get("any_errors_fatal") is False or task.get("ignore_errors") is True, task["name"]
