# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible configuration that no play can set, and the lines to add to an ansible.cfg if the collection is installed."""

from __future__ import annotations

import math
import os

from ansible import constants, context

from ..module_utils._kit.words import plural

STORY = "nanochat.ddp.story"
FORKS = "forks = {}"


def forks() -> int:
    """Number of hosts that Ansible handles at a time."""
    return int(context.CLIARGS.get("forks") or constants.DEFAULT_FORKS)


def display_is_ours() -> bool:
    """Whether this collection's display is in use; with -v it leaves the output to Ansible's."""
    return bool(constants.DEFAULT_STDOUT_CALLBACK == STORY)


def shows_progress() -> bool:
    """Whether loop attempts are shown as progress; Ansible's own output calls each of them FAILED."""
    return display_is_ours() and not context.CLIARGS.get("verbosity")


def display_is_chosen() -> bool:
    """Whether a display was chosen, ours or another."""
    return constants.DEFAULT_STDOUT_CALLBACK != "default" or "ANSIBLE_STDOUT_CALLBACK" in os.environ


def facts_are_variables() -> bool:
    """Whether facts from a host become variables, including those by which a play finds files of the controller."""
    return bool(constants.INJECT_FACTS_AS_VARS)


def _at_a_time(hosts: int, enough: int) -> str:
    return f"Ansible handles {plural(enough, 'host')} at a time and the job has {hosts}"


def _add(lines: list[str], hosts: int) -> str:
    once = f" (or once: --forks {hosts})" if FORKS.format(hosts) in lines else ""
    return f"add to ansible.cfg below [defaults]: {' and '.join(lines)}{once}"


def lacking(hosts: int, enough: int, chosen: bool, variables: bool) -> str:
    """One sentence with the lines to add; empty if nothing is missing."""
    lacks = {
        FORKS.format(hosts): (
            enough < hosts and f"{_at_a_time(hosts, enough)}, so every task takes {math.ceil(hosts / enough)} rounds"
        ),
        "inject_facts_as_vars = false": variables and "Ansible turns facts from hosts into play variables",
        f"stdout_callback = {STORY}": (
            not chosen and "This collection has its own display, which shows the progress of a run"
        ),
    }
    why = {line: reason for line, reason in lacks.items() if reason}
    return f"{'; '.join(why.values())}; {_add(list(why), hosts)}" if why else ""
