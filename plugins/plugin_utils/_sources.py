# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sources of a trainer, read on the controller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ansible.errors import AnsibleActionFail

from ..module_utils._trainer.files import TreeError, read_tree


def sources(arguments: Mapping[str, object]) -> dict[str, bytes]:
    """Every file of the folder that the option `src` names."""
    folder = Path(str(arguments.get("src", ""))).expanduser()
    if not folder.is_dir():
        raise AnsibleActionFail(f"the sources of the trainer are not on the controller: {folder} is not a folder")
    try:
        return read_tree(str(folder))
    except TreeError as why:
        raise AnsibleActionFail(str(why)) from why
