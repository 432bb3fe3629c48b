# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packs our code into one program that runs on a host with nothing but Python.

Whatever the umask, only its user may write what it makes. The program contains the source of a module of ours and of everything it
imports from this collection, under their real names. So the same file works for Ansible (which sends it in an archive), for a process
that outlives its module, and for a poll over the connection without any file. Such a program can build further ones from what it
contains.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

PACKAGE = "ansible_collections.nanochat.ddp.plugins.module_utils"
# At the beginning of a line: what is only for the types is indented.
IMPORT = re.compile(r"^from (\.+)([\w.]*) import (?:\(([^)]*)\)|(.*))$", re.M)
_PROGRAM = """\
import json, os, sys, types
os.umask(os.umask(0) | 0o022)
class _Source:
    def __init__(self, text):
        self.text = text
    def get_source(self, name):
        return self.text
def _load(name, source):
    parent = ""
    for part in name.split(".")[:-1]:
        whole = parent + "." + part if parent else part
        if whole not in sys.modules:
            sys.modules[whole] = types.ModuleType(whole)
            sys.modules[whole].__path__ = []
            if parent:
                setattr(sys.modules[parent], part, sys.modules[whole])
        parent = whole
    module = sys.modules[name] = types.ModuleType(name)
    module.__loader__ = _Source(source)
    module.__package__ = parent
    setattr(sys.modules[parent], name.split(".")[-1], module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module
for _name, _source in json.loads({sources!r}):
    _load(_name, _source)
sys.modules[{module!r}].{function}(*json.loads({arguments!r}))
"""


def program(module: str, function: str, *arguments: Any, needs: tuple[str, ...] = ()) -> str:
    """Source of a program that calls `module`.`function` with these arguments (JSON); needs: further modules that it contains."""
    text = sources_text((*needs, module))
    return _PROGRAM.format(sources=text, module=module, function=function, arguments=json.dumps(arguments))


@functools.cache
def sources_text(modules: tuple[str, ...]) -> str:
    """Name and source of the modules and of their imports from this collection, dependencies first, as the program contains them; cached,
    because a controller builds a program per host."""
    found: dict[str, str] = {}
    for name in modules:
        _collect(name, found)
    return json.dumps(list(found.items()))


def _collect(name: str, found: dict[str, str]) -> None:
    if name in found:
        return
    source, imported = _read(name)
    for needed in imported:
        _collect(needed, found)
    found[name] = source


@functools.cache
def _read(name: str) -> tuple[str, list[str]]:
    """The source of a file of ours, also from the archive in which Ansible sends a module, and what it imports."""
    # Not imported where it only is to be sent.
    there = sys.modules.get(name) or importlib.util.find_spec(name)
    loader: Any = there.__loader__ if isinstance(there, ModuleType) else there and there.loader
    source = loader.get_source(name)
    # Ansible's collection loader, on the controller, returns bytes.
    text = source.decode("utf-8") if isinstance(source, bytes) else str(source)
    imported = []
    for level, path, several, one in IMPORT.findall(text):
        module = ".".join([*name.split(".")[: -len(level)], *filter(None, [path])])
        # `from .file import thing`, or `from ..room import file`: files are one floor below the rooms.
        is_file = module.count(".") == PACKAGE.count(".") + 2
        files = [f"{module}.{word.split()[0]}" for word in (several or one).split(",") if word.strip()]
        imported += [module] if is_file else files
    return text, imported
