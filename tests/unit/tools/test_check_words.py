# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The words that users would not search for are found, and the tree has none."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tools import check_words


@pytest.mark.parametrize(
    "line", ["The network card eth0 of laptop is down", "it must be even; 66 would do.", "The host gave no answer"]
)
def test_a_word_of_the_private_register_is_found(line):
    assert [number for number, dummy_found, dummy_usual in check_words.problems(f"good\n{line}\n")] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "It can run in check mode and tell what it would do without doing it",
        "recommended",
        "a rank is stuck",
        "card  # words: ok",
    ],
)
def test_usual_words_are_left_alone(line):
    assert list(check_words.problems(line)) == []


def test_a_docstring_that_begins_with_a_clause_is_found():
    quotes = '"' * 3
    lines = ["What git knows.", "Tracked files.", "What is a room?", "By which figures are ordered."]
    text = "\n".join(f"{quotes}{line}{quotes}" for line in lines)
    assert [number for number, *dummy in check_words.problems(text, check_words.CLAUSES)] == [1, 4]


def test_a_class_name_that_stands_for_two_things_is_found(tmp_path):
    contract = tmp_path / "_contract"
    contract.mkdir()
    texts = {
        "a.py": "class Seen: pass\nclass ActionModule: pass\nclass Plan: pass\n",
        "b.py": "\nclass Seen: pass\nclass ActionModule: pass\n",
        "_contract/c.py": "class Plan(TypedDict): pass\nclass Whole(Plan): pass\nclass Seen(Exception): pass\n",
        "d.py": "class Whole: pass\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    found = list(check_words.doubles(tmp_path / name for name in [*texts, "link.py"]))
    assert [(path.name, line) for path, line, dummy in found] == [("b.py", 2), ("c.py", 3)]
    assert found[0][2] == f"the class Seen has the name of that of {tmp_path}/a.py:1"


def test_the_tree_has_none_of_them(capsys):
    assert check_words.main() == 0, capsys.readouterr().out
