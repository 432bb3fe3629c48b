# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shared by trainer_venv and trainer_wheels: options, pip's environment, the lock, and error reports."""

from __future__ import annotations

import platform
from typing import Any, Callable, Mapping

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.urls import NO_CREDENTIALS, has_credentials
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import (
    HostInterpreter,
    VenvError,
    find_interpreter,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.packages import VenvSpec
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.venv import Venv, building

SPEC: dict[str, dict[str, object]] = {
    "path": {"type": "path", "required": True},
    "host": {"type": "str"},
    "requirements": {"type": "list", "elements": "str", "default": []},
    "python": {"type": "str"},
    "python_minimum": {"type": "str", "default": "3.10"},
    "torch_index": {"type": "str", "default": "auto"},
    "lock_seconds": {"type": "int", "default": 1800},
}
NO_PYTHON = HostInterpreter("", (3, 0, 0), "", False, False, False, "")
# pip must install into the environment, whatever target the user's settings name; other settings stay.
PIP_ENVIRONMENT = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_TARGET": "", "PIP_PREFIX": "", "PYTHONPATH": ""}
Make = Callable[[Any, Venv], Mapping[str, object]]


def run_module(module: Any, make: Make, removes: bool = False, leaves_foreign: bool = True) -> None:
    """Run `make` with the options; removing an environment needs no suitable Python."""
    given = module.params
    wanted = wanted_of(given)
    run, base = runner(module), NO_PYTHON
    tags: dict[str, str] | None = None
    try:
        if has_credentials(wanted.torch_index):
            raise VenvError(f"{wanted.host}: torch_index is {NO_CREDENTIALS}", "requirement")
        if not removes:
            base = find_interpreter(
                run, module.get_bin_path, given["python"] or "", given["python_minimum"], wanted.host
            )
        tags = base.tags
        venv = Venv(wanted, run, base)
        # Somebody else's environment is only read, and its folder may not be writable for a lock.
        if module.check_mode or (leaves_foreign and venv.place() == "foreign"):
            result = make(module, venv)
        else:
            with building(wanted.path, wanted.host, given["lock_seconds"]):
                result = make(module, venv)
    except VenvError as why:
        module.fail_json(msg=str(why), reason=why.reason, tags=tags)
    except told.Untrue as why:
        module.fail_json(msg=f"{wanted.host}: {why}", reason="other", tags=tags)
    except OSError as why:
        message = f"{wanted.host}: {why.filename or wanted.path}: {why.strerror or why}"
        module.fail_json(msg=message, reason="folder", tags=tags)
    module.exit_json(venv=wanted.path, python=venv.python, python_version=base.minor, tags=tags, **result)


def wanted_of(given: Mapping[str, Any]) -> VenvSpec:
    """The wanted environment, from the module's options."""
    requirements = tuple(one.strip() for one in given["requirements"] if one.strip())
    path, wheels = given["path"].rstrip("/"), given["wheels_dir"] or ""
    return VenvSpec(
        given["host"] or platform.node(), path, requirements, given["torch_index"], wheels, given.get("offline", False)
    )


def run_with(module: Any, argv: list[str], environ: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program with additional environment variables; exit code 127 if it cannot run."""
    try:
        rc, out, err = module.run_command(
            argv, environ_update={**environ, "LC_ALL": "C.UTF-8"}, handle_exceptions=False
        )
    except OSError as why:
        return 127, "", f"{argv[0]}: {why.strerror}"
    return int(rc), str(out), str(err)


def runner(module: Any) -> Callable[[list[str]], tuple[int, str, str]]:
    """Runs programs in pip's environment."""
    return lambda argv: run_with(module, argv, PIP_ENVIRONMENT)
