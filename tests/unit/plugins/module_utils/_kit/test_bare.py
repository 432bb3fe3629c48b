# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands and paths of a host."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare


def test_a_command_is_run_or_says_why_not(tmp_path):
    assert bare.run(["sh", "-c", "echo $A; echo no >&2; pwd; exit 3"], {"A": "1"}, str(tmp_path)) == (
        3,
        f"1\n{tmp_path}\n",
        "no\n",
    )
    assert bare.run(["/none/such"]) == (127, "", "/none/such: No such file or directory")
    assert bare.tool(["none-such"]) == (127, "", "none-such is not installed")
    assert (bare.find("no-such-program"), bool(bare.find("sh"))) == (None, True)


def test_paths_are_those_of_this_host(monkeypatch):
    monkeypatch.setenv("PLACE", "/srv")
    given = {"path": "~/a", "base_dir": "$PLACE/b", "plain": "~", "run_dir": None}
    home = Path("~").expanduser()
    assert bare.expanded(given) == {**given, "path": f"{home}/a", "base_dir": "/srv/b"}
