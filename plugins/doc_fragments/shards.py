# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options and attributes of the modules for folders of shards."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  path:
    description: The folder of the files on this host.
    type: path
    required: true
  host:
    description: Name of this host in messages and results; by default its own host name.
    type: str
attributes:
  check_mode:
    description: Says what would be made, moved or linked, and changes nothing.
    support: full
  diff_mode:
    description: Shows the files before and after.
    support: full
  idempotent:
    description: A second run changes nothing; unchanged files are not even read again.
    support: full
"""
    VERIFY = r"""
options:
  verify:
    description:
      - V(changed) reads only files whose size, time or inode have changed since they were read last.
      - V(full) reads every file, which also finds bytes that rotted on the disk.
    type: str
    choices: [changed, full]
    default: changed
"""
