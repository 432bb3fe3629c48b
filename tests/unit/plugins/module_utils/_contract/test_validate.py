# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Answers of a hostile host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import validate

TRUE = [
    (validate.plain_name, "3.11-x86_64"), (validate.file_path, "tokenizer/my file.pkl"), (validate.absolute_path, "/home/größer/a b"),
    (validate.sha256, "0a" * 32), (validate.port, 40000), (validate.address, "192.168.1.10"), (validate.address, "2001:db8::1"),
    (validate.whole, 0),
]  # fmt: skip
UNTRUE: dict[Callable[[Any], object], list[Any]] = {
    validate.plain_name: ["", "..", "a/b", ".ssh", "-rf", "a\n", "a" * 101, None, 4, ["a"]],
    validate.file_path: ["", "/a", "a/../b", ".a", "a/.b", "a//b", "a\nb", "a\0", "a\x1b[2J", "a/" + "b" * 256, None, 4],
    validate.absolute_path: ["", "a", "~/a", "/a/../b", "/a\n!touch b", "/a\0", "/\x9b2J", "/" + "a" * 5000, None, 4],
    validate.sha256: ["", "0" * 63, "A" * 64, "/../../../ab" + "0" * 52, None, 4],
    validate.port: [0, 22, 1023, 65536, "40000", True, None, 4e4],
    validate.address: ["", "a", "192.168.1.10%eth0", "2001:db8::1%;reboot", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", None, 4],
    validate.whole: [-1, 2**60, "1", 1.0, True, None],
}  # fmt: skip


def test_what_can_be_is_taken():
    assert [check(value) for check, value in TRUE] == [value for dummy, value in TRUE]


@pytest.mark.parametrize(("check", "value"), [(check, value) for check, values in UNTRUE.items() for value in values])
def test_what_cannot_be_is_refused_in_words_that_no_terminal_obeys(check, value):
    with pytest.raises(validate.InvalidHostData, match="check that host: it may be compromised or broken") as why:
        check(value)
    assert str(why.value).isprintable()
