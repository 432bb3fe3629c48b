# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training in a run folder, and whether a new plan can resume from its checkpoints.

A training starts where there is nothing to resume, and keeps its id as long as it is resumed. Numbers order a run's trainings: a new
one gets one more than any host knows, so a host that was away has a lower number. The plan checks the probes before any change; the
run folder checks again before it moves anything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, TypedDict

from .document import Document, items, number, section, text

if TYPE_CHECKING:
    from typing import NotRequired


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
    if name is None or not re.fullmatch("[0-9a-f]{16}", name):
        return None
    bounded = {key: min(max(0, number(document, key)), 2**32) for key in ("number", "begun")}
    return {"id": name, "number": bounded["number"], "begun": bounded["begun"]}


# What checkpoints depend on

# The deciding parts of the plan's sections, with the settings that users know them by.
MODEL = {key: "ddp_" + key for key in ("depth", "aspect_ratio", "head_dim", "sequence", "window_pattern", "vocab_size")}
# For a data set only the id decides; these explain a difference, each group only if nothing before it does.
DATA = (
    {"source": "ddp_data_source", "url": "ddp_data_url", "shards": "ddp_data_shards", "vocab_size": "ddp_vocab_size"},
    {"paths": "ddp_data_paths"},
    {"host": "ddp_data_host"},
    {"id": "the data set"},
)


def of_plan(plan: Mapping[str, object]) -> Dict[str, Document]:
    """The parts of this plan that its checkpoints depend on; empty if the plan lacks them."""
    model, data = section(plan, "model"), section(plan, "data")
    talks = section(section(plan, "stage"), "conversations")
    return {
        "model": {key: model[key] for key in MODEL if key in model},
        "stage": {"conversations": {"sha256": talks["sha256"]}} if talks.get("sha256") else {},
        "data": {key: data.get(key) for group in DATA for key in group} if data.get("id") else {},
    }


def differences(deployed: Mapping[str, object], plan: Mapping[str, object]) -> List[str]:
    """Why checkpoints of the deployed plan do not fit the new one, such as `ddp_depth was 4 and is 8 now`; empty if training can resume
    from them."""
    was, now = of_plan(deployed), of_plan(plan)
    found = _differing(MODEL, {key: was["model"].get(key, now["model"].get(key)) for key in MODEL}, now["model"])
    if was["data"] and was["data"]["id"] != now["data"].get("id"):
        groups = (_differing(group, was["data"], now["data"]) for group in DATA)
        found += next((group for group in groups if group), [])
    if was["stage"] and now["stage"]:
        talks: List[Document] = [
            {"id": str(section(one["stage"], "conversations").get("sha256"))[:8]} for one in (was, now)
        ]
        found += _differing({"id": "the SHA-256 of ddp_sft_data"}, *talks)
    return list(dict.fromkeys(found))


def _differing(names: Mapping[str, str], was: Mapping[str, object], now: Mapping[str, object]) -> List[str]:
    values = {name: (was.get(key), now.get(key)) for key, name in names.items()}
    return [
        "%s was %s and is %s now" % (name, *map(_words, both)) for name, both in values.items() if both[0] != both[1]
    ]


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "not set"
    return "not set" if value is None else str(value)


def resumes(plan: Mapping[str, object]) -> bool:
    """Whether the trainer will resume from a checkpoint, by the setting or a user argument."""
    asked = any(name.startswith("resume") for node in items(plan, "nodes") for name in section(node, "flags"))
    return asked or bool(section(plan, "training").get("resume"))
