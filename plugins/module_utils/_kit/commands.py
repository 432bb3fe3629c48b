# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the tools of a host for a module's logic."""

from __future__ import annotations

from typing import Any, Callable

from .bare import MORE_PATHS

MISSING = 127


def runner(module: Any) -> Callable[[list[str]], tuple[int, str, str]]:
    """`run(argv)` in the C locale; returns 127 for a program that is not installed, like a shell."""
    paths: dict[str, str | None] = {}

    def run(argv: list[str]) -> tuple[int, str, str]:
        program = argv[0]
        if program not in paths:
            paths[program] = module.get_bin_path(program, opt_dirs=list(MORE_PATHS))
        path = paths[program]
        if path is None:
            return MISSING, "", f"{program} is not installed"
        code, out, err = module.run_command([path, *argv[1:]], environ_update={"LC_ALL": "C", "LANGUAGE": "C"})
        return int(code), str(out), str(err)

    return run
