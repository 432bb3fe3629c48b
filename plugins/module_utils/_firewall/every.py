# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Backend, with every file that has one; written by tools/generate_docs.py."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall import firewalld, iptables, nftables, ufw
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import Backend

__all__ = ["Backend", "firewalld", "iptables", "nftables", "ufw"]
