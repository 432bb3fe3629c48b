# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The data set of a plan: its name, and the host that makes it or already has it.

Its id depends on the content and not on the source host, so training resumes whichever hosts take part.
"""

from __future__ import annotations

import math
from typing import Any, Iterator, Optional, Sequence

from .._contract.document import digest_of
from .._contract.findings import Finding, finding
from .._contract.plan import Data, DataContents, Here, Plan
from .._contract.probe import Folder
from .._contract.settings_table import LAST_SHARD, RunSettings
from .._kit.words import plural
from .hosts import Host, home_expanded

# Bytes of the default text, the prose in a Python's library, which differs little between versions.
PROSE_BYTES = 1_800_000
# Mean bytes of a token: they grow with the logarithm of the vocabulary.
BYTES_PER_DOUBLING, BYTES_LESS = 0.4, 1.6
# Sources for which a named host's own files count.
ON_A_HOST = ("text", "host")


def hosts_with_data(hosts: Sequence[Host], identifier: str) -> list[str]:
    """The hosts with the data set in their store."""
    return [host.name for host in hosts if any(entry.get("id") == identifier for entry in host.fact("data") or [])]


def document(run: RunSettings, by_rank: Sequence[Host], here: Here) -> Data:
    """The plan's section."""
    source, seen = run.data_source, here.get("folders", {})
    paths = {"url": [], "controller": [seen[path]["path"] if path in seen else path for path in run.data_paths]}
    contents: DataContents = {
        "source": source,
        "paths": paths.get(source, [*run.data_paths]),
        "url": run.data_url.rstrip("/") if source == "url" else None,
        "shards": run.data_shards,
        "vocab_size": run.vocab_size,
        # The first shards of the collection, and its last one for validation.
        "names": [f"shard_{number:05d}.parquet" for number in [*range(run.data_shards - 1), LAST_SHARD]]
        if source == "url"
        else None,
    }
    # The host that is set, or the master, makes or fetches it.
    made_on = next((host for host in by_rank if host.name == run.data_host), by_rank[0])
    # If nobody has named a text, it is the prose in a Python's library.
    is_prose = source == "text" and not run.data_paths
    known = _deployed(run, by_rank, contents, None if is_prose else _paths(source, contents["paths"], made_on))
    named = {"host": run.data_host} if source in ON_A_HOST and run.data_host else {}
    marked = {"prose": True} if is_prose else {}
    identifier = known.get("id") or f"{source}-{digest_of({**contents, **named, **marked})[:8]}"
    # If possible the same host as last time has it.
    having = hosts_with_data(by_rank, identifier)
    wanted = [run.data_host, known.get("host"), *(host.name for host in by_rank)]
    name = next((name for name in wanted if name in having), made_on.name)
    (at,) = [host for host in by_rank if host.name == name]
    return {
        "id": identifier,
        **contents,
        "host": name,
        "paths": _paths(source, contents["paths"], at),
        "prose": is_prose,
    }


def text_bytes(run: RunSettings, hosts: Sequence[Host], plan: Plan) -> Optional[int]:
    """The size of the text on its host; None if unknown, or if the data are something else. It is not in the plan: a text that
    grows makes no other one."""
    if plan["data"]["source"] != "text":
        return None
    (at,) = [host for host in hosts if host.name == plan["data"]["host"]]
    sizes = [at.fact("folders", path, "text_bytes") for path in run.data_paths] or [PROSE_BYTES]
    return None if None in sizes else sum(sizes)


def times_read(plan: Plan, size: Optional[int]) -> Optional[float]:
    """How many times the run's steps read a text of this size, all but the shard for validation; None if unknown."""
    data, training = plan["data"], plan["training"]
    if not size or "stage" in plan:
        return None
    bytes_per_token = max(1.0, BYTES_PER_DOUBLING * math.log2(data["vocab_size"]) - BYTES_LESS)
    return training["tokens"] * bytes_per_token / (size * (data["shards"] - 1) / data["shards"])


def _paths(source: str, paths: Sequence[str], at: Host) -> list[str]:
    """The paths as that host reads them; without any, text comes from its Python's library."""
    if source not in ON_A_HOST:
        return list(paths)
    library = at.fact("python", "library")
    return [home_expanded(path, at) for path in paths or ([library] if source == "text" and library else [])]


def _deployed(
    run: RunSettings, hosts: Sequence[Host], contents: DataContents, paths: list[str] | None
) -> dict[str, Any]:
    """The data set that this run, or its base model's, has used so far, if it still matches the settings: a host may have been
    renamed or removed. paths: those of the settings on the host that would make it, if they count."""
    present = [host.name for host in hosts]
    for host in hosts:
        known = host.fact("run", "lineage", "data") or host.fact("base_run", "lineage", "data") or {}
        same = all(known.get(key) == contents[key] for key in ("source", "url", "shards", "vocab_size"))
        same = same and (paths is None or known.get("paths") == paths)
        other = contents["source"] in ON_A_HOST and run.data_host not in (None, known.get("host"))
        if same and not (other and known.get("host") in present):
            return dict(known)
    return {}


def obstacles(run: RunSettings, planned: Data, hosts: Sequence[Host], here: Here) -> Iterator[Finding]:
    """The first problem of each folder in ddp_data_paths, unless the data set was already made from them."""
    if hosts_with_data(hosts, planned["id"]):
        return
    names = [one.name for one in hosts]
    if run.data_host and run.data_host not in names:
        text = f"ddp_data_host is {run.data_host}, which is not a host of this job"
        yield finding("setting-refused", "", text, remedy=f"Use {' or '.join(names)}.")
    (host,) = [one for one in hosts if one.name == planned["host"]]
    is_here = planned["source"] == "controller"
    folders = (here.get("folders") if is_here else host.fact("folders")) or {}
    where, is_text = "the controller" if is_here else host.name, planned["source"] == "text"
    for number, path in enumerate(run.data_paths if planned["source"] != "url" else []):
        facts: Folder | None = folders.get(path)
        is_tokenizer, problem = number > 0 and not is_text, ""
        if not facts:
            continue
        if facts["kind"] == "absent" or (facts["kind"] == "file" and not is_text):
            problem = f"does not exist on {where}{'' if is_text else ' as a folder'}"
        elif not facts["readable"]:
            problem = f"the login user on {where} cannot read"
        elif is_text and facts["text_bytes"] == 0:
            problem = f"has no files on {where}"
        elif is_tokenizer and not facts["tokenizer"]:
            problem = f"has no tokenizer (tokenizer.pkl and token_bytes.pt) on {where}"
        elif not is_text and not is_tokenizer and facts["shards"] < planned["shards"]:
            count = plural(facts["shards"], "shard") if facts["shards"] else "no shards"
            problem = f"has {count} (*.parquet) on {where}, but ddp_data_shards is {planned['shards']}"
        if problem:
            seen = f"ddp_data_paths names {path}, which {problem}"
            yield finding("source-missing", "" if is_here else host.name, seen)
