#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: tmux_session
short_description: Manage one named tmux session that runs one program
version_added: 0.1.0
description:
  - Starts, restarts, stops and removes one tmux session that runs a program with its own environment, working folder and
    log, and returns its state.
  - The program outlives the SSH connection and the controller. C(tmux attach -t NAME) shows its output while it
    runs and after its end; the log has standard output and standard error of all starts.
  - Stopping ends everything that the session started and nothing else. Processes that can save their work (ranks, or else
    the processes without children) get SIGTERM first and have O(stop_timeout) seconds; then all get SIGTERM, then all are killed.
    A process belongs to the session if it descends from it or has its id in E(NANOCHAT_DDP_SESSION); its name and command line do not matter.
  - The program gets the variables of O(env_file), and besides these only E(HOME), E(USER), E(LOGNAME), E(SHELL), a
    standard E(PATH), C(LANG=C.UTF-8), C(PYTHONUNBUFFERED=1) and E(NANOCHAT_DDP_SESSION).
  - If O(env_file) sets E(NANOCHAT_POLITE) to C(low) or C(guest), the program runs at idle priority, and is killed first when memory runs out.
  - Writes C(run.sh) into O(state_dir), which can be run by hand too, and C(session.json) with the session's state and end.
extends_documentation_fragment:
  - nanochat.ddp.changer
attributes:
  diff_mode:
    description: Returns what the session was given and would be given. Of the environment only the names are shown.
    support: full
  idempotent:
    description: With O(state=restarted) each run is a change. With the other states a second run changes nothing.
    support: partial
requirements:
  - tmux on the host, for O(state=started) and O(state=restarted)
options:
  name:
    description: The session's name, made of letters, digits, C(_) and C(-).
    type: str
    required: true
  state_dir:
    description: The folder in which C(session.json), C(run.sh) and the session's own files are kept.
    type: path
    required: true
  argv:
    description:
      - The program and its arguments; no shell interprets them.
      - Required when O(state=started) or O(state=restarted).
    type: list
    elements: str
  chdir:
    description: The folder in which the program runs, by default O(state_dir).
    type: path
  env_file:
    description: A file of assignments for a POSIX shell, as M(nanochat.ddp.env_file) writes it.
    type: path
  log:
    description:
      - The file to which the program's output is appended, by default C(log/NAME.log) below O(state_dir). Its folder is created.
    type: path
  state:
    description:
      - V(started) leaves alone a session that runs with the same O(argv), O(chdir), O(log) and environment, and restarts
        one that runs with others. One that has ended with the same is left as it is, unless O(rerun=true).
      - V(restarted) stops it if it runs, and starts it.
      - V(ready) changes nothing, and fails if the session could not be started, for example without tmux, with the name in use, or without the
        program, folder or environment. All hosts are asked this before running sessions are stopped for a new start.
      - V(stopped) ends its processes. The pane and C(session.json) stay.
      - V(absent) does the same and removes the tmux session and C(session.json) as well. The log and C(run.sh) stay.
    type: str
    choices: [started, restarted, ready, stopped, absent]
    default: started
  rerun:
    description: With O(state=started), whether a session that has ended with the same program is started again.
    type: bool
    default: false
  revive:
    description:
      - Whether a program that is killed, or exits with code 75 (C(EX_TEMPFAIL)), is started again on the same host, after one second at first
        and up to a minute if it keeps dying.
      - Its remaining processes are ended first. A program that is stopped is not started again.
    type: bool
    default: false
  at_boot:
    description:
      - Whether the session is started again when the host boots, unless it had ended or was stopped. It then runs its last command.
      - This is done by a unit of the user's own systemd, which starts before a login where the user lingers (C(loginctl enable-linger), tried
        without root). Where that is impossible, a warning says what to do.
      - By default this stays as it is. With O(state=absent) it ends.
    type: bool
  stop_timeout:
    description: Seconds in which the program may save its work when it is stopped.
    type: int
    default: 60
seealso:
  - module: nanochat.ddp.env_file
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
"""

EXAMPLES = r"""
- name: Train
  nanochat.ddp.tmux_session:
    name: nanochat-d4-rank0
    state_dir: /mnt/data/nanochat/runs/d4
    chdir: /mnt/data/nanochat/trainer
    env_file: /mnt/data/nanochat/runs/d4/env
    log: /mnt/data/nanochat/runs/d4/log/rank0.log
    argv:
      - /mnt/data/nanochat/venv/bin/python
      - -m
      - torch.distributed.run
      - --nnodes=2
      - -m
      - scripts.base_train

- name: Stop, with five minutes for saving
  nanochat.ddp.tmux_session:
    name: nanochat-d4-rank0
    state_dir: /mnt/data/nanochat/runs/d4
    state: stopped
    stop_timeout: 300
"""

RETURN = r"""
session:
  description:
    - The content of C(session.json), with these and further values, and RV(session.state). In check mode as it is now.
    - Of a session that is not there, only the state is returned.
  returned: always
  type: dict
  contains:
    state:
      description: V(absent), V(running), V(finished), or V(gone) if it disappeared without an exit status, as after a restart of the host.
      type: str
    pid:
      description: The process inside the pane.
      type: int
    log:
      description: The file with its output.
      type: str
    started:
      description: When it was started, in seconds since 1970.
      type: float
    ended:
      description: When it ended, V(null) while it runs.
      type: float
    exit_code:
      description: The program's exit code, V(null) if it has none.
      type: int
    signal:
      description: The signal that ended the program, V(null) if none did.
      type: int
    stopped:
      description: Whether a user stopped it before its end, by O(state=stopped) or by Ctrl-C in the pane.
      type: bool
    terminated_by:
      description: The signal by which its host ended it, as V(SIGTERM) when the host is shut down, V(null) if none did.
      type: str
    revived:
      description: How often the program has died and was started again (O(revive)).
      type: int
    died_of:
      description: What it died of last, as V(signal 9) or V(code 75).
      type: str
  sample:
    state: finished
    exit_code: 0
action:
  description: What was done, or would be done. One of V(none), V(start), V(restart), V(stop), V(remove).
  returned: success
  type: str
  sample: start
at_boot:
  description: What starts the session after a reboot, V(systemd) or V(none); V(none) also if O(at_boot) was not given.
  returned: success
  type: str
  sample: systemd
"""


from ..module_utils._kit.module import ansible_module
from ..module_utils._session.session import ERRORS, NEEDED, OPTIONS, tmux_session


def main() -> None:
    module = ansible_module(argument_spec=OPTIONS, required_if=NEEDED, supports_check_mode=True)
    try:
        result = tmux_session(module.check_mode, **module.params)
    except ERRORS as error:
        module.fail_json(msg=str(error))
    for warning in result.pop("warnings"):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
