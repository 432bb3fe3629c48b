# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders and repositories in the settings: where to check them, and their problems."""

from __future__ import annotations

from typing import Iterator, Sequence

from .._contract.findings import Finding, finding
from .._contract.findings_table import WARNING
from .._contract.plan import Data, Here, Plan, Trainer
from .._contract.probe import Folder
from .._contract.settings_table import RunSettings
from .._kit.words import plural
from .data_set import ON_A_HOST, hosts_with_data
from .hosts import Host, ranks


def folders_of(run: RunSettings, hosts: Sequence[Host], name: str) -> list[str]:
    """The folders in the settings that this host should check."""
    order = ranks(hosts)[0]
    maker = run.data_host or min(hosts, key=lambda host: order.get(host.name, len(hosts))).name
    return list(run.data_paths) if run.data_source in ON_A_HOST and maker == name else []


def obstacles(run: RunSettings, plan: Plan, hosts: Sequence[Host], here: Here) -> Iterator[Finding]:
    """Problems that a start would meet only later, after changing other hosts."""
    yield from trainer(run, plan["trainer"], here)
    yield from data(run, plan["data"], hosts, here)
    facts = here.get("results")
    if facts and not facts["writable"]:
        where = f"which is not writable on the controller ({facts['path']})"
        yield finding("results-read-only", "", f"ddp_results_dir is {run.results_dir}, {where}")


def trainer(run: RunSettings, planned: Trainer, here: Here) -> Iterator[Finding]:
    """Whether the controller has the trainer's source."""
    source = run.trainer_source
    facts = here.get("folders", {}).get(source) if planned["source"] == "path" else None
    problem = here.get("git", "") if planned["source"] == "git" else ""
    if facts and facts["kind"] != "folder":
        problem = f"{facts['path']} is not a folder on the controller"
    elif facts and not facts["trainer"]:
        problem = f"{facts['path']} on the controller has no scripts/base_train.py, so it is not a nanochat checkout"
    if problem:
        yield finding("source-missing", "", f"ddp_trainer_source is {source}, but {problem}")


def commit(source: str, here: Here) -> Iterator[Finding]:
    """The commit in use of a repository, which is cloned only once."""
    used, newest = (str((here.get("commits") or {}).get(name) or "")[:10] for name in ("used", "newest"))
    seen = f"ddp_trainer_source is {source}"
    if used and newest and used != newest:
        seen += f", and the controller uses its commit {used}; the repository now has {newest}"
        yield finding("trainer-commit", "", seen, severity=WARNING)
    elif used:
        yield finding("trainer-commit", "", f"{seen}, at commit {used}")


def data(run: RunSettings, planned: Data, hosts: Sequence[Host], here: Here) -> Iterator[Finding]:
    """Data folders that are missing or too small, unless the data set was already made from them."""
    if hosts_with_data(hosts, planned["id"]):
        return
    names = [one.name for one in hosts]
    if run.data_host and run.data_host not in names:
        text = f"ddp_data_host is {run.data_host}, which is not a host of this job"
        yield finding("setting-refused", "", text, remedy=f"Use {' or '.join(names)}.")
    (host,) = [one for one in hosts if one.name == planned["host"]]
    is_here = planned["source"] == "controller"
    seen = (here.get("folders") if is_here else host.fact("folders")) or {}
    for number, path in enumerate(run.data_paths if planned["source"] != "url" else []):
        if seen.get(path):
            is_tokenizer = number > 0 and planned["source"] != "text"
            yield from folder(planned, path, seen[path], "" if is_here else host.name, is_tokenizer)


def folder(planned: Data, path: str, facts: Folder, host: str, is_tokenizer: bool) -> Iterator[Finding]:
    """The first problem of a folder in ddp_data_paths on a host, or without a host on the controller."""
    where, is_text = host or "the controller", planned["source"] == "text"
    problem = ""
    if facts["kind"] == "absent":
        problem = f"does not exist on {where}"
    elif facts["kind"] == "file" and not is_text:
        problem = f"is not a folder on {where}"
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
        yield finding("source-missing", host, f"ddp_data_paths names {path}, which {problem}")
