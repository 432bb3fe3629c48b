# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""FirewallBackend, with every file that has one; written by tools/generate_docs.py."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall import firewalld, iptables, nftables, ufw
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallBackend

__all__ = ["FirewallBackend", "firewalld", "iptables", "nftables", "ufw"]
