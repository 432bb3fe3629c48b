# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of Ansible's configuration no play can set, and the lines that an ansible.cfg lacks where the collection is installed."""

from __future__ import annotations

from ansible import constants, context
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import plural

STORY = "nanochat.ddp.story"


def forks() -> int:
    """On so many hosts Ansible works at a time."""
    return int(context.CLIARGS.get("forks") or constants.DEFAULT_FORKS)


def shows_results() -> bool:
    """Whether the display is ours, which shows what the results of its actions tell; with -v it is Ansible's own."""
    return bool(constants.DEFAULT_STDOUT_CALLBACK == STORY and not context.CLIARGS.get("verbosity"))


def display_is_chosen() -> bool:
    """Whether somebody chose how the output looks, be it ours or another."""
    return bool(constants.config.get_config_value_and_origin("DEFAULT_STDOUT_CALLBACK")[1] != "default")


def lacking(hosts: int, enough: int, chosen: bool) -> str:
    """One sentence with the lines to add; nothing where nothing is lacking."""
    few = enough < hosts
    lines = [f"forks = {hosts}"] if few else []
    lines += [] if chosen else [f"stdout_callback = {STORY}"]
    if not lines:
        return ""
    at_a_time = f"Ansible works on {plural(enough, 'host')} at a time and the job has {hosts}"
    why = f"{at_a_time}, so the rest are followed only after these have ended"
    told = why if few else "This collection has a display of its own, which shows the progress of a run"
    once = f" (for once: --forks {hosts})" if few else ""
    return f"{told}; add to ansible.cfg below [defaults]: {' and '.join(lines)}{once}"
