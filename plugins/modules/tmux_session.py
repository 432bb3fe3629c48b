#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: tmux_session
short_description: One named tmux session that runs one program
version_added: 0.1.0
description:
  - Starts, restarts, stops and removes one tmux session that runs a program with its own environment, working folder and
    log, and tells what became of it.
  - The program outlives the SSH connection and the controller. C(tmux attach -t NAME) shows its output while it
    runs and after its end; the log has it line by line, standard output and standard error.
  - Stopping ends everything that the session started and nothing else. Those who can save their work are asked first (the
    workers of torchrun, or else the last children) and have O(stop_timeout) seconds; then all are asked, then all are killed.
    A process belongs to the session if it descends from it or carries its id in E(NANOCHAT_DDP_SESSION); neither its name
    nor its command line is ever looked at.
  - The program gets the variables of O(env_file), and of its surroundings only E(HOME), E(USER), E(LOGNAME), E(SHELL), a
    standard E(PATH), C(LANG=C.UTF-8), C(PYTHONUNBUFFERED=1) and E(NANOCHAT_DDP_SESSION).
  - Writes C(run.sh) into O(state_dir), which a person can run by hand just as well, and C(session.json), which says how it
    is and how it ended.
attributes:
  check_mode:
    description: Can run in check mode and return what would change without changing it.
    support: full
  diff_mode:
    description: Returns what the session was given and would be given. Of the environment only names and short digests
      are shown.
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
      - The program and its arguments. No shell looks at them.
      - Required when O(state=started) or O(state=restarted).
    type: list
    elements: str
  chdir:
    description: The folder in which the program runs. It is O(state_dir) if nothing is said.
    type: path
  env_file:
    description: A file of assignments that a POSIX shell reads, as M(nanochat.ddp.env_file) writes it.
    type: path
  log:
    description:
      - The file to which the program's output is appended. Its folder is created if need be.
      - It is C(log/NAME.log) below O(state_dir) if nothing is said.
    type: path
  state:
    description:
      - V(started) leaves alone a session that runs with the same O(argv), O(chdir), O(log) and environment, and restarts
        one that runs with others. One that has ended with the same is left as it is, unless O(rerun=true).
      - V(restarted) stops it if it runs, and starts it.
      - V(ready) changes nothing, and fails where the session could not be started, as without tmux, with the name in use, or with a
        program, a folder or an environment that is not there. It is asked of all hosts before what runs is stopped for a new start.
      - V(stopped) ends its processes. The pane and C(session.json) stay.
      - V(absent) does the same and removes the tmux session and C(session.json) as well. The log and C(run.sh) stay.
    type: str
    choices: [started, restarted, ready, stopped, absent]
    default: started
  rerun:
    description: With O(state=started), whether a session that has ended with the same program is started again.
    type: bool
    default: false
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
    - The content of C(session.json), and RV(session.state). In check mode as it is now.
    - Of a session that is not there, only the state is returned.
  returned: always
  type: dict
  contains:
    state:
      description: V(absent), V(running), V(finished), or V(gone) if it disappeared without an exit status, as after a restart of the host.
      type: str
    id:
      description: The value of E(NANOCHAT_DDP_SESSION) of all its processes.
      type: str
    session:
      description: The session's name.
      type: str
    argv:
      description: The program and its arguments.
      type: list
      elements: str
    boot_id:
      description: The boot of the host in which it was started.
      type: str
    pid:
      description: The process inside the pane.
      type: int
    pid_start:
      description: When that process started, in clock ticks after the boot.
      type: int
    child_pid:
      description: The program's process.
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
      description: Whether it was asked to stop before its end.
      type: bool
  sample:
    state: finished
    exit_code: 0
action:
  description: What was done, or would be done. One of V(none), V(start), V(restart), V(stop), V(remove).
  returned: success
  type: str
  sample: start
"""

import os
from typing import Any, Mapping

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file as env_file_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes as processes_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.logind import logind as logind_of
from ansible_collections.nanochat.ddp.plugins.module_utils._session import session as session_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._session import tmux as tmux_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._session.record import Status

STARTING = ("started", "restarted", "ready")


def decide(session: session_utils.Session, params: Mapping[str, Any], spec: session_utils.Spec | None) -> str:
    """What has to be done to bring the session into the wanted state."""
    status, wanted = session.status()["state"], params["state"]
    running = status == session_utils.RUNNING
    if wanted == "restarted":
        return "restart" if running else "start"
    if spec is not None:
        if running:
            return "none" if session.same(spec) else "restart"
        ended_as_wanted = status == session_utils.FINISHED and not params["rerun"] and session.same(spec)
        return "none" if ended_as_wanted else "start"
    if wanted == "absent" and (status != session_utils.ABSENT or session.launch()):
        return "remove"
    return "stop" if running or session.left_over() else "none"


def carry_out(session: session_utils.Session, action: str, spec: session_utils.Spec | None, timeout: int) -> None:
    """Do it. Whatever is started, what an earlier session left behind is ended first."""
    if action == "none":
        return
    if spec is not None:
        # What could not be started again is not stopped for it.
        session.check_startable(spec)
    session.stop(timeout)
    if action == "remove":
        session.remove()
    elif spec is not None:
        session.start(spec, timeout)


def difference(session: session_utils.Session, action: str, spec: session_utils.Spec | None) -> dict[str, str]:
    """What the session was given and is given, before anything is done."""
    status = session.status()["state"]
    before = session.describe(None, status)
    after = before
    if action == "stop":
        after = session.describe(None, session_utils.FINISHED if status == session_utils.RUNNING else status)
    elif action != "none":
        after = session.describe(spec, session_utils.ABSENT if action == "remove" else session_utils.RUNNING)
    return {"before": before, "after": after, "before_header": session.name, "after_header": session.name}


def connect(module: AnsibleModule) -> tuple[tmux_utils.Tmux | None, bool]:
    """The user's own tmux server (None without tmux), and whether logging out would kill what is started now."""
    path = module.get_bin_path("tmux")
    if path is None:
        return None, False
    # Inside tmux the client would take the server around it instead of the user's own.
    os.environ.pop("TMUX", None)

    def run(argv: list[str]) -> tuple[int, str, str]:
        program = module.get_bin_path(argv[0])
        if program is None:
            return 127, "", f"{argv[0]} is not installed"
        code, out, err = module.run_command([program, *argv[1:]], cwd="/")
        return int(code), str(out), str(err)

    if module.params["state"] not in ("started", "restarted"):
        return tmux_utils.Tmux(run, path), False
    logind = logind_of(run, processes_utils.user_name(os.getuid()))
    return tmux_utils.Tmux(run, path, session_utils.user_scope(*logind)), logind.kills


def warn_of_logout(module: AnsibleModule, status: Status) -> None:
    """Say so if the session will not survive the connection by which it was started."""
    if status["state"] == session_utils.RUNNING and tmux_utils.ends_with_login(status.get("pid", 0)):
        user = processes_utils.user_name(os.getuid())
        module.warn(
            f"systemd ends the processes of {user} at logout here (KillUserProcesses=yes), so this session will end with "
            f"the SSH connection; let {user} linger (loginctl enable-linger {user}), log out everywhere and start it again"
        )


def apply(module: AnsibleModule) -> dict[str, object]:
    """Bring the session into its state and tell what was done, or would be done."""
    params = module.params
    tmux, logout_kills = connect(module)
    session = session_utils.Session(params["name"], params["state_dir"], tmux)
    spec = None
    if params["state"] in STARTING:
        spec = session_utils.spec_from(
            params["argv"], params["chdir"], params["env_file"], params["log"], session.state_dir, session.name
        )
        session.check_free()
    if spec is not None and params["state"] == "ready":
        session.check_startable(spec)
        return {"changed": False, "action": "none", "session": session.status()}
    with session.locked(make=spec is not None and not module.check_mode, timeout=params["stop_timeout"] + 60):
        action = decide(session, params, spec)
        diff = difference(session, action, spec)
        if not module.check_mode:
            carry_out(session, action, spec, params["stop_timeout"])
        status = session.status()
    if logout_kills:
        warn_of_logout(module, status)
    return {"changed": action != "none", "action": action, "diff": diff, "session": status}


def main() -> None:
    module = checked_module(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "argv": {"type": "list", "elements": "str"},
            "chdir": {"type": "path"},
            "env_file": {"type": "path"},
            "log": {"type": "path"},
            "state": {
                "type": "str",
                "choices": ["started", "restarted", "ready", "stopped", "absent"],
                "default": "started",
            },
            "rerun": {"type": "bool", "default": False},
            "stop_timeout": {"type": "int", "default": 60},
        },
        required_if=[("state", state, ["argv"]) for state in STARTING],
        bounds={"stop_timeout": (0, 31 * 86400)},
        supports_check_mode=True,
    )
    try:
        module.exit_json(**apply(module))
    except (session_utils.SessionError, tmux_utils.TmuxError, env_file_utils.EnvFileError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
