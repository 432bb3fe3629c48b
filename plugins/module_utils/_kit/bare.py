# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Takes the place of Ansible's module in a program that host_code sends to a host: commands, and a way to answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Type

# Where modules look beside the PATH, too.
MORE_PATHS = ("/usr/sbin", "/sbin", "/usr/local/sbin")


def find(name: str) -> Optional[str]:
    """Where a program is."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *MORE_PATHS]))


def run(
    argv: Sequence[str], environ: Optional[Mapping[str, str]] = None, folder: Optional[str] = None
) -> Tuple[int, str, str]:
    """Runs a program with an addition to its environment; what cannot be run ends with 127."""
    try:
        done = subprocess.run(
            list(argv),
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as why:
        return 127, "", f"{argv[0]}: {why.strerror}"
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def expanded(params: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The parameters with these paths as this host means them: its home is not the controller's."""
    paths: List[str] = [name for name in names if params.get(name)]
    return {**params, **{name: os.path.expanduser(os.path.expandvars(str(params[name]))) for name in paths}}


def change(
    mark: str,
    params: Mapping[str, Any],
    paths: Sequence[str],
    apply: Callable[[Mapping[str, Any], bool], Mapping[str, Any]],
    refusals: Tuple[Type[Exception], ...],
) -> None:
    """Bring something into its state, or tell what would be done, and tell the controller what came of it."""
    try:
        result = apply(expanded(params, paths), params["check"])
    except refusals as error:
        result = {"failed": True, "msg": str(error)}
    answer(mark, result)


def answer(mark: str, result: Mapping[str, Any]) -> None:
    """Tell the controller, behind a mark by which it knows the line."""
    sys.stdout.write(mark + json.dumps(result) + "\n")
