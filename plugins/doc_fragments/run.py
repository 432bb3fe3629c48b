# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options that select a run on a host."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  run_dir:
    description:
      - The run folder. C(~) stands for the home of the user on the host.
      - Either this or O(base_dir) is needed.
    type: path
  base_dir:
    description: The base folder whose C(runs/) holds the run folders.
    type: path
  run:
    description: Name of the run below O(base_dir). Without it the run that was written to last is taken.
    type: str
"""
