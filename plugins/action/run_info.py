# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run_info without a module."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from ..module_utils._run import polling
from ..module_utils._run.find import ONE_RUN
from ..module_utils._run.state import RunState
from ..plugin_utils._look import BareAction


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = polling
    ANSWER: ClassVar[Mapping[str, Any]] = {"run": RunState}
    CHECKS: ClassVar[Mapping[str, object]] = ONE_RUN
