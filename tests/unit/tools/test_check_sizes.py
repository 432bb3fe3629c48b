# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and functions that no longer fit on a screen are found."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tools import check_sizes


def function(name, lines):
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (function("a", 50) + function("main", 35), []),
        ("x = 1\n" + function("a", 51), ["2: a() has 51 lines, more than 50"]),
        (function("main", 36), ["1: main() has 36 lines, more than 35"]),
        ("x = 1\n" * 450, []),
        ("x = 1\n" * 451, ["1: the file has 451 lines, more than 450"]),
    ],
)
def test_what_is_too_long_is_named_with_its_line(text, found, tmp_path, capsys):
    path = tmp_path / "a.py"
    path.write_text(text)
    assert check_sizes.main([str(path)]) == bool(found)
    assert capsys.readouterr().out.splitlines() == [f"{path}:{line}" for line in found]
