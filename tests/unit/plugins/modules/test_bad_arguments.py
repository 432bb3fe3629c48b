# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever a module is given, it ends in a result or in a sentence: no traceback, no hang."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import background, bare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODULES = ("env_file", "peer_firewall", "shard_sync", "tmux_session")
# What programs of the host say to a module that runs some: nothing, what fits, and what no such program says.
SAYINGS = (
    (0, "", ""), (1, "", "no such option"), (127, "", "not installed"), (0, "{", ""), (0, "[[], 1, null]", ""), (0, "[{}]", ""),
    (0, "3", ""),
    (0, '{"version": [3, 12, 1]}', ""), (0, '{"version": ["a", {}, null]}', ""), (0, "\udcff -j accept {", ""),
    (0, '{"version": [3, 12, 1], "executable": "/x", "machine": "x86_64", "libc": null, "venv": 1, "ensurepip": 1, "pip": 1}', ""),
    (0, '[{"dev": 3, "prefsrc": [], "addr_info": [1, {"local": null}], "ifname": null}]', ""),
)  # fmt: skip
PACKAGE = "ansible_collections.nanochat.ddp.plugins.modules"
SECONDS = 20
# Of each module; NANOCHAT_DDP_CASES=3000 tries more.
CASES = int(os.environ.get("NANOCHAT_DDP_CASES", "100"))


def deep(levels: int) -> Any:
    nested: Any = []
    for dummy in range(levels):
        nested = [nested]
    return nested


# No lone surrogates: Ansible itself refuses text that is not UTF-8, before a module sees it.
KEYS = ["a", "model", "nodes", "data", "shards", "log/rank0.log", "size", "A"]
ODD = st.sampled_from(
    [
        "", " ", ".", "..", "/", "~", "a\0b", "é", "a" * 5000, "-1", "nan", "1e999", "[]", "{}", "{", "0x10", "true",
        "$HOME",
        *("{{ x }}", "/dev/null", "/dev/zero", "/proc/self/mem", True, False, None, float("inf"), float("nan"), 0.5),
        *(0, -1, 1, 2**31, 2**63, 10**400, -(10**30)), [], {}, [[]], [{}], [None], [1, "a"], {"a": 1}, {"a": None},
        {"": ""}, {"a\0": "b"}, {"a": {"b": ["c"]}}, deep(60), deep(400),
    ]
)  # fmt: skip
TREE = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def fitting(option: dict[str, Any], folder: Path) -> st.SearchStrategy[Any]:
    """A valid value for an option's type, or now and then an odd one."""
    kind = option.get("type", "str")
    if "choices" in option:
        return st.sampled_from(option["choices"]) | ODD
    if kind == "dict" and option.get("suboptions"):
        return whole(option["suboptions"], folder) | TREE
    if kind == "list" and option.get("suboptions"):
        return st.lists(whole(option["suboptions"], folder) | TREE, max_size=3) | TREE
    if kind == "dict":
        return st.dictionaries(st.sampled_from(KEYS), TREE, max_size=4) | TREE
    right = {
        "path": st.sampled_from(
            [str(folder), str(folder / "new"), str(folder / "file"), str(folder / "pipe"), "relative"]
        ),
        "str": st.sampled_from(["d4", "x", "127.0.0.1", "::1", "40000-40100", "0600", "http://127.0.0.1:9/x"]),
        "int": st.integers(0, 9),
        "float": st.floats(0, 0.01),
        "bool": st.booleans(),
        "list": st.lists(TREE, max_size=3),
    }
    return right.get(kind, TREE) | ODD


def whole(options: dict[str, Any], folder: Path) -> st.SearchStrategy[dict[str, Any]]:
    required = {name: fitting(one, folder) for name, one in options.items() if one.get("required")}
    others = {name: fitting(one, folder) for name, one in options.items() if not one.get("required")}
    return st.fixed_dictionaries(required, optional=others)


@contextlib.contextmanager
def limited(what: str) -> Iterator[None]:
    """A case that does not end is a failure that names it."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"no answer within {SECONDS} s: {what}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(module: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    said = io.StringIO()
    with (
        limited(repr(arguments)[:2000]),
        contextlib.redirect_stdout(said),
        patch_module_args(arguments),
        pytest.raises(SystemExit),
    ):
        module.main()
    return dict(json.loads(said.getvalue()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the paths lead that are right, and no process or packet leaves it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "file").write_text("x")
    os.mkfifo(folder / "pipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("TMUX_TMPDIR", str(folder))
        patch.setattr(basic.AnsibleModule, "_log_to_syslog", lambda self, message: None)
        patch.setattr(background, "spawn", _refuse)
        patch.setattr(bare, "run", _says)
        patch.setattr(socket, "getaddrinfo", _refuse)
        yield folder


def _says(argv: list[str], *dummy: Any, **dummy_more: Any) -> tuple[int, str, str]:
    """One of the sayings, always the same one to the same words."""
    assert all(isinstance(word, str) and "\0" not in word for word in argv)
    return SAYINGS[zlib.crc32(repr(argv).encode()) % len(SAYINGS)]


def _refuse(*dummy: Any, **dummy_more: Any) -> Any:
    raise OSError(111, "Connection refused")


@pytest.mark.parametrize("name", MODULES)
def test_odd_arguments_end_in_a_sentence(name: str, place: Path) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    options = yaml.safe_load(module.DOCUMENTATION)["options"]

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(whole(options, place))
    def check(arguments: dict[str, Any]) -> None:
        told = answer(module, {**arguments, "_ansible_check_mode": True, "_ansible_diff": True})
        if told.get("failed"):
            assert told["msg"] and "Traceback" not in told["msg"], arguments

    check()
