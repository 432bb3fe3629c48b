# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The prediction that preflight made, beside what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.predict import comparison_text


def prediction_check(prediction: Any, results: Any) -> str:
    """A few lines for people; nothing where there was no prediction or no figure."""
    if not isinstance(results, Mapping):
        raise AnsibleFilterError(f"a dictionary from host to result is wanted, not {type(results).__name__}")
    runs = {str(host): result.get("run") or {} for host, result in results.items() if isinstance(result, Mapping)}
    return comparison_text(prediction if isinstance(prediction, Mapping) else {}, runs)


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """What templates may use."""
        return {"prediction_check": prediction_check}
