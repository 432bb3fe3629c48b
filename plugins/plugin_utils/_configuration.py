# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible configuration that no play can set, and the lines to add to an ansible.cfg if the collection is installed."""

from __future__ import annotations

import os

from ansible import constants, context

from ..module_utils._kit.words import plural

STORY = "nanochat.ddp.story"


def display_is_ours() -> bool:
    """Whether this collection's display is in use; with -v it leaves the output to Ansible's."""
    return bool(constants.DEFAULT_STDOUT_CALLBACK == STORY)


def shows_progress() -> bool:
    """Whether loop attempts are shown as progress; Ansible's own output calls each of them FAILED."""
    return display_is_ours() and not context.CLIARGS.get("verbosity")


def lacking(hosts: int) -> str:
    """One sentence with the lines to add for a job of so many hosts; empty if nothing is missing."""
    forks = int(context.CLIARGS.get("forks") or constants.DEFAULT_FORKS)
    is_default = constants.DEFAULT_STDOUT_CALLBACK == "default" and "ANSIBLE_STDOUT_CALLBACK" not in os.environ
    why = {}
    if forks < hosts:
        why[f"forks = {hosts}"] = f"Ansible handles {plural(forks, 'host')} at a time and the job has {hosts}"
    if constants.INJECT_FACTS_AS_VARS:
        # Among them those by which a play finds files of the controller.
        why["inject_facts_as_vars = false"] = "Ansible turns facts from hosts into play variables"
    if is_default:
        why[f"stdout_callback = {STORY}"] = "This collection has its own display, which shows the progress of a run"
    once = f" (or once: --forks {hosts})" if forks < hosts else ""
    return f"{'; '.join(why.values())}; add to ansible.cfg below [defaults]: {' and '.join(why)}{once}" if why else ""
