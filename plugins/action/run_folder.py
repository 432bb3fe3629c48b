# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run_folder without a module."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from ..module_utils._keeper import deployment
from ..plugin_utils._look import BareAction


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = deployment
    CHANGES: ClassVar[bool] = True
