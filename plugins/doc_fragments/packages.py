# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options for the wanted packages and their Python."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  host:
    description: Name of this host in messages; by default its own host name.
    type: str
  requirements:
    description: Requirements as pip takes them, pinned with C(==).
    type: list
    elements: str
    default: []
  python:
    description: The interpreter, a name or a path; by default the first of C(python3.11), C(python3.12), C(python3.13), C(python3.10),
      C(python3.14) and C(python3) that is recent enough.
    type: str
  python_minimum:
    description: The oldest Python that can be used.
    type: str
    default: '3.10'
  torch_index:
    description:
      - Where torch is looked for first. V(auto) is PyTorch's own index of CPU builds, V(default) asks no other index than
        the user's own.
      - An index that does not answer at once is passed over, with a warning, in favour of the user's own.
    type: str
    default: auto
"""
    LOCK = r"""
options:
  lock_seconds:
    description: How long another process may take to build the same path.
    type: int
    default: 1800
"""
