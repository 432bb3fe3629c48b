# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The attributes of modules that only read."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
attributes:
  check_mode:
    description: It only reads, in check mode too.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: N/A
  idempotent:
    description: Nothing is changed, however often it runs.
    support: full
"""
    # Of actions that look at the host again and again.
    LOOKS = r"""
attributes:
  async:
    description: Looks are short; a loop with C(until) does the waiting.
    support: none
  bypass_host_loop:
    description: It runs for each host.
    support: none
  platform:
    platforms: posix
    support: full
"""
