#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: session_boot
short_description: Start a session again after a reboot
version_added: 0.1.0
description:
  - Makes a session of M(nanochat.ddp.tmux_session) start when the host boots, or stops that.
  - This is a unit of the user's own systemd, which starts before a login where the user lingers (C(loginctl enable-linger), tried
    without root), or else a line of the user's crontab. If neither works, nothing is changed and a warning says what is missing.
  - After a reboot the session runs its last command. A session that had ended or was stopped is not started.
extends_documentation_fragment:
  - nanochat.ddp.changer
options:
  name:
    description: The name of the session.
    type: str
    required: true
  state_dir:
    description: The folder in which the session keeps its files. With O(state=present) it must exist.
    type: path
    required: true
  state:
    description: Whether the session is started after a reboot.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: nanochat.ddp.tmux_session
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
"""

EXAMPLES = r"""
- name: Restart automatically after a reboot
  nanochat.ddp.session_boot:
    name: nanochat-d4-rank0
    state_dir: /mnt/data/nanochat/runs/d4

- name: Disable that again
  nanochat.ddp.session_boot:
    name: nanochat-d4-rank0
    state_dir: /mnt/data/nanochat/runs/d4
    state: absent
"""

RETURN = r"""
way:
  description: What starts the session after a reboot. One of V(systemd), V(cron), V(none).
  returned: success
  type: str
  sample: systemd
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils._contract.run_folder import BOOT
from ..module_utils._kit import host_code
from ..module_utils._kit.arguments import checked_module
from ..module_utils._kit.commands import runner
from ..module_utils._kit.processes import user_name
from ..module_utils._session import boot
from ..module_utils._session.tmux import TmuxError, check_name


def apply(module: AnsibleModule) -> dict[str, object]:
    """Bring the entry into its state and tell by what the session is started."""
    name, state_dir = check_name(module.params["name"]), os.path.abspath(module.params["state_dir"])
    source = host_code.program(boot.__name__, "main", state_dir).encode("utf-8")
    entry = boot.BootEntry(runner(module), name, os.path.join(state_dir, BOOT), source)
    before, wanted, user = entry.way(), boot.NONE, user_name(os.getuid())
    if module.params["state"] == "present":
        wanted = entry.possible(user, module.check_mode)
        missing = "" if wanted != boot.NONE else f"neither systemd nor cron starts programs of {user} at boot"
        try:
            if wanted not in (boot.NONE, before) and not module.check_mode:
                entry.start_by(wanted)
        except (boot.BootError, OSError) as error:
            # The run goes on without.
            wanted, missing = boot.NONE, f"{error}"
        if missing:
            module.warn(
                f"{name} will not start after a reboot: {missing}; `sudo loginctl enable-linger {user}` on that "
                "host makes that possible, or start it with the playbook nanochat.ddp.join"
            )
    if not module.check_mode and wanted == boot.NONE:
        entry.start_by(boot.NONE)
    diff = {
        "before": f"started by: {before}\n",
        "after": f"started by: {wanted}\n",
        "before_header": name,
        "after_header": name,
    }
    return {"changed": wanted != before, "way": wanted, "diff": diff}


def main() -> None:
    module = checked_module(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**apply(module))
    except (boot.BootError, TmuxError) as error:
        module.fail_json(msg=f"{error}")
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror or error}")


if __name__ == "__main__":
    main()
