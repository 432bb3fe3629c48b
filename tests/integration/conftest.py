# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Modules run here as in the unit tests, but against the real tools."""

from ansible_collections.nanochat.ddp.tests.unit.conftest import run_module

__all__ = ["run_module"]
