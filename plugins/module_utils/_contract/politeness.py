# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How polite training is on a host (ddp_polite), and the variable of its environment that says so."""

from __future__ import annotations

OFF, LOW, GUEST = "off", "low", "guest"
VARIABLE = "NANOCHAT_POLITE"
