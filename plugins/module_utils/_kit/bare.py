# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs commands on a host, for modules and for programs that host_code sends, and returns such a program's answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Type

# Folders that modules search in addition to PATH.
MORE_PATHS = ("/usr/sbin", "/sbin", "/usr/local/sbin")
TIMED_OUT = "it did not end in time"


def find(name: str) -> Optional[str]:
    """Path of a program."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *MORE_PATHS]))


def run(
    argv: Sequence[str],
    environ: Optional[Mapping[str, str]] = None,
    folder: Optional[str] = None,
    seconds: Optional[float] = None,
) -> Tuple[int, str, str]:
    """Run a program with additional environment variables; returns 127 if it cannot be run, or not within so many seconds."""
    try:
        process = subprocess.Popen(  # pylint: disable=ansible-bad-function
            list(argv),
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=seconds is not None,
        )
    except OSError as why:
        return 127, "", f"{argv[0]}: {why.strerror}"
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # With what it has started: a shell's commands are processes of their own.
            os.killpg(process.pid, signal.SIGKILL)
            return 127, "", TIMED_OUT
    return process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def run_tool(argv: Sequence[str]) -> Tuple[int, str, str]:
    """Run a tool of the host, also one outside of PATH, in the C locale; returns 127 if it is not installed."""
    path = find(argv[0])
    if path is None:
        return 127, "", f"{argv[0]} is not installed"
    return run([path, *argv[1:]], {"LC_ALL": "C", "LANGUAGE": "C"})


def expanded(params: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The parameters with these paths expanded for this host, whose home differs from the controller's."""
    paths: List[str] = [name for name in names if params.get(name)]
    return {**params, **{name: os.path.expanduser(os.path.expandvars(str(params[name]))) for name in paths}}


def change(
    mark: str,
    params: Mapping[str, Any],
    paths: Sequence[str],
    apply: Callable[[Mapping[str, Any], bool], Mapping[str, Any]],
    refusals: Tuple[Type[Exception], ...],
) -> None:
    """Bring something into its state, or predict that, and send the result to the controller."""
    try:
        result = apply(expanded(params, paths), params["check"])
    except refusals as error:
        result = {"failed": True, "msg": str(error)}
    answer(mark, result)


def answer(mark: str, result: Mapping[str, Any]) -> None:
    """Send the answer to the controller, behind a marker that identifies the line."""
    sys.stdout.write(mark + json.dumps(result) + "\n")
