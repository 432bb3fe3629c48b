# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filters nanochat.ddp.diagnose and nanochat.ddp.doctor_bundle."""

from __future__ import annotations

from typing import Any, Callable, Dict

from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.bundle import bundle
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose


class FilterModule:
    """Filters of this file."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        return {"diagnose": diagnose, "doctor_bundle": bundle}
