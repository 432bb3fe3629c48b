# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs commands on a host, and calls a verb in a program that host_code sends there and returns its answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple

# Folders that modules search in addition to PATH.
MORE_PATHS = ("/usr/local/bin", "/usr/sbin", "/sbin", "/usr/local/sbin")
TIMED_OUT = "it did not end in time"
# How the names of parameters end that are paths.
PATHS = ("_dir", "path", "dest")
Arguments = Mapping[str, object]  # of a verb, or its answer
OURS = "ansible_collections.nanochat.ddp."


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


def tool(argv: Sequence[str]) -> Tuple[int, str, str]:
    """Run a tool of the host, also one outside of PATH, in the C locale; returns 127 if it is not installed, like a shell."""
    program = find(argv[0])
    if program is None:
        return 127, "", f"{argv[0]} is not installed"
    return run([program, *argv[1:]], {"LC_ALL": "C", "LANGUAGE": "C"})


def expanded(params: Arguments) -> Dict[str, object]:
    """The parameters with the paths among them, which their names tell, expanded for this host: its home is not the controller's."""
    paths = [name for name, value in params.items() if name.endswith(PATHS) and value]
    return {**params, **{name: os.path.expanduser(os.path.expandvars(str(params[name]))) for name in paths}}


def answer(mark: str, module: str, verb: str, params: Arguments, usual: Arguments, environ: Mapping[str, str]) -> None:
    """Call a verb, and send its answer, or why it refuses, to the controller behind a marker that identifies the line."""
    os.environ.update(environ)
    sys.stdout.write(mark + json.dumps(answer_of(getattr(sys.modules[module], verb), params, usual)) + "\n")


def answer_of(verb: Callable[..., Arguments], params: Arguments, usual: Arguments) -> Arguments:
    """A verb's answer, or the sentence of the error with which it refuses; usual: parameters for those verbs that have them."""
    own = verb.__code__.co_varnames[: verb.__code__.co_argcount]
    try:
        return verb(**expanded({**{name: value for name, value in usual.items() if name in own}, **params}))
    except OSError as error:
        return {"failed": True, "msg": f"{error.filename}: {error.strerror}" if error.filename else str(error)}
    except Exception as error:  # whatever it is, nobody on a host reads it
        # Errors of this collection's own classes are sentences.
        ours = type(error).__module__.startswith(OURS)
        return {"failed": True, "msg": str(error) if ours else f"{verb.__name__}: {type(error).__name__}: {error}"}
