# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wheels of a hostile donor, and the index that knows better."""

from __future__ import annotations

import hashlib

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told import Untrue
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import confirm

GOOD, EVIL = "0a" * 32, "ff" * 32


def settings(**lines: str):
    """A pip with these settings."""
    out = "".join(f":env:.{name.replace('_', '-')}='{value}'\n" for name, value in lines.items())
    return lambda argv: (0, out if argv[-2:] == ["config", "list"] else "", "")


def wheel(sha256: str, name: str = "Tiny_Thing-1.0-py3-none-any.whl") -> dict[str, object]:
    return {"name": name, "sha256": sha256, "bytes": 9}


@pytest.fixture
def index(tmp_path):
    """An index of one project in folders, as a web server would hand it out."""
    page = tmp_path / "simple/tiny-thing/index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/tiny_thing-1.0-py3-none-any.whl#sha256={GOOD}">tiny</a>')
    return f"file://{tmp_path}/simple"


def ask(files, run, torch_index="default"):
    return confirm.unconfirmed(files, torch_index, run, ["pip"])


def test_only_what_an_index_lists_for_that_project_is_confirmed(index):
    run = settings(index_url=index)
    assert ask([wheel(GOOD)], run) == []
    assert ask([wheel(GOOD), wheel(EVIL, "tiny_thing-2.0-py3-none-any.whl")], run) == [
        "tiny_thing-2.0-py3-none-any.whl"
    ]
    # A good file under the name of another package is not that package.
    assert ask([wheel(GOOD, "torch-2.13.0-cp311.whl")], run) == ["torch-2.13.0-cp311.whl"]


def test_where_no_index_answers_nothing_is_confirmed(tmp_path):
    assert ask([wheel(GOOD)], settings(index_url=f"file://{tmp_path}/none")) == ["Tiny_Thing-1.0-py3-none-any.whl"]


def test_folders_of_wheels_count_by_what_is_in_them(tmp_path):
    (tmp_path / "tiny_thing-1.0-py3-none-any.whl").write_bytes(b"content")
    run = settings(no_index="1", find_links=str(tmp_path))
    assert ask([wheel(hashlib.sha256(b"content").hexdigest())], run) == []
    assert ask([wheel(GOOD)], run) == ["Tiny_Thing-1.0-py3-none-any.whl"]


def test_the_index_of_torch_is_asked_beside_the_default():
    assert confirm.places("auto", {}) == [confirm.DEFAULT_INDEX, confirm.CPU_INDEX]
    assert confirm.places("https://x/cpu", {"index-url": "https://y", "extra-index-url": "https://z"}) == [
        "https://z",
        "https://y",
        "https://x/cpu",
    ]


@pytest.mark.parametrize("one", [wheel(GOOD, "../x.whl"), wheel("../x"), {}, wheel(GOOD, "a\n")])
def test_what_is_no_file_is_refused(one, index):
    with pytest.raises(Untrue):
        ask([one], settings(index_url=index))
