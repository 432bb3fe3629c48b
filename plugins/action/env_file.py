# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""env_file without a module."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

from ..module_utils._kit import env_state
from ..plugin_utils._look import BareAction


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = env_state
    CHECKS: ClassVar[Mapping[str, object]] = {"required_if": env_state.NEEDED}
    CHANGES: ClassVar[bool] = True
