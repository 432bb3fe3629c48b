# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks from its sources whether we can drive a nanochat checkout; runs on the controller and executes none of it."""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Optional, Sequence

from .._kit.files import read_text

BASE_TRAIN = "scripts.base_train"
CHECKPOINTS = os.path.join("nanochat", "checkpoint_manager.py")
# Parameters, in order, of the checkout's functions that the launcher wraps.
PARAMETERS = {
    "save_checkpoint": ("checkpoint_dir", "step", "model_data", "optimizer_data", "meta_data"),
    "load_checkpoint": ("checkpoint_dir", "step", "device"),
}


def problems(folder: str, flags: Sequence[str], module: str = BASE_TRAIN) -> dict[str, list[str]]:
    """Why a checkout's script cannot train, as ends of sentences: with or without joined ranks, and only with."""
    folder, name = os.path.abspath(os.path.expanduser(folder)), module.replace(".", os.sep) + ".py"
    script, wrong = _source(folder, name)
    unknown = [flag for flag in flags if not _mentions(script, flag)]
    if not wrong and unknown:
        wrong = [f"has a {name} without {', '.join(unknown)}"]
    return {"script": wrong, "join": _join_problems(folder) if script else []}


def _source(folder: str, name: str) -> tuple[str, list[str]]:
    """The text of a source, empty if unreadable, and why it cannot be used."""
    text = read_text(os.path.join(folder, name))
    if not text:
        return text, [f"has no readable {name}"]
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return text, [f"has a {name} that is not valid Python ({error})"]
    return text, []


def _mentions(script: str, flag: str) -> bool:
    """Whether a script contains a flag in any spelling, because some build their flags in a loop."""
    words = flag.lstrip("-").split("-")
    return re.search(r"(?<![\w-])(--)?" + "[-_]".join(map(re.escape, words)) + r"(?![\w-])", script) is not None


def _join_problems(folder: str) -> list[str]:
    text, wrong = _source(folder, CHECKPOINTS)
    if wrong:
        return wrong
    found = {one.name: one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)}
    return [problem for name in PARAMETERS for problem in _signature_problems(name, found.get(name))]


def _signature_problems(name: str, function: Optional[Any]) -> list[str]:
    wanted = PARAMETERS[name]
    if function is None:
        return [f"has no {name} in {CHECKPOINTS}"]
    given = tuple(one.arg for one in [*function.args.posonlyargs, *function.args.args])
    if given[: len(wanted)] == wanted:
        return []
    return [f"has a {name}({', '.join(given)}) in {CHECKPOINTS}, where {name}({', '.join(wanted)}) is expected"]
