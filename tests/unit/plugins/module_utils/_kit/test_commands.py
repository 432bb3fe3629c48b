# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tools of a host, run by a module and by a program of ours without Ansible."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare, commands


class Module:
    """The parts of an AnsibleModule that run commands."""

    def __init__(self):
        self.looked, self.ran = [], []

    def get_bin_path(self, program, opt_dirs):
        self.looked.append(program)
        return {"tool": "/usr/sbin/tool"}.get(program)

    def run_command(self, argv, environ_update):
        self.ran.append((argv, environ_update["LC_ALL"]))
        return 3, "out", "err"


def test_a_module_runs_a_tool_where_it_lies_and_in_the_c_locale():
    module = Module()
    run = commands.runner(module)
    assert [run(["tool", "show"]), run(["tool", "-x"])] == [(3, "out", "err")] * 2
    assert module.ran == [(["/usr/sbin/tool", "show"], "C"), (["/usr/sbin/tool", "-x"], "C")]
    assert run(["none"]) == (127, "", "none is not installed")
    assert module.looked == ["tool", "none"]


def test_without_a_module_it_is_the_same(tmp_path):
    assert bare.run(["sh", "-c", "echo $A; echo no >&2; pwd; exit 3"], {"A": "1"}, str(tmp_path)) == (
        3,
        f"1\n{tmp_path}\n",
        "no\n",
    )
    assert bare.run(["/none/such"]) == (127, "", "/none/such: No such file or directory")
    assert (bare.find("no-such-program"), bool(bare.find("sh"))) == (None, True)


def test_paths_are_those_of_this_host(monkeypatch):
    monkeypatch.setenv("PLACE", "/srv")
    given = {"path": "~/a", "base_dir": "$PLACE/b", "plain": "~", "run_dir": None}
    home = Path("~").expanduser()
    assert bare.expanded(given) == {**given, "path": f"{home}/a", "base_dir": "/srv/b"}
