# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of what lies below the base folder of a host (docs/architecture.md), each of them once."""

from __future__ import annotations

# The files of a tokenizer folder.
TOKENIZER = ("tokenizer.pkl", "token_bytes.pt")
