# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of a run with a budget, in words."""

from __future__ import annotations

import time

from ansible_collections.nanochat.ddp.plugins.module_utils._run import ending

END = time.mktime((2026, 11, 25, 7, 30, 0, 0, 0, -1))


def test_end_in_words():
    def clock(at: float) -> str:
        return time.strftime("%H:%M", time.localtime(at))

    assert ending.ends_text(END, 0.612, clock) == "ends at 07:30, 61 % done"
    assert ending.ends_text(END, None, clock) == "ends at 07:30"
    early = ending.ended_text(END - 120, END, "07:30", clock)
    assert early == "ended at 07:28, 2 min 00 s early, of a budget until 07:30"
    assert ending.ended_text(END + 3, END, "8h", clock) == "ended at 07:30, 3.0 s late, of a budget of 8h"
