# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training in a run folder. It starts where there is nothing to resume, and keeps its id as long as it is resumed.

Numbers order a run's trainings: a new one gets one more than any host knows, so a host that was away has a
lower number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Optional, TypedDict

from .document import number, text

if TYPE_CHECKING:
    from typing import NotRequired

ID = "[0-9a-f]{16}"


class TrainingIdentity(TypedDict):
    """The content of training.json."""

    id: str
    number: int
    begun: int


class Launched(TrainingIdentity):
    """The training to start. A folder continues if it holds goes_on: an id, "" for a training without a known id, None for nothing."""

    goes_on: Optional[str]
    base: Optional[str]  # the training of a fine-tuning's base model
    ends: NotRequired[Optional[int]]  # of a timed run: when the trainer is to be over, by the controller's clock
    now: NotRequired[Optional[float]]  # that clock when this is handed to a host


def training_of(document: object) -> Optional[TrainingIdentity]:
    """Validate the content of training.json; None if invalid."""
    name = text(document, "id")
    if name is None or not re.fullmatch(ID, name):
        return None
    bounded = {key: min(max(0, number(document, key)), 2**32) for key in ("number", "begun")}
    return {"id": name, "number": bounded["number"], "begun": bounded["begun"]}
