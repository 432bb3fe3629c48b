# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copies the files of a run from the hosts that have changed since the last time, and reports on them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...module_utils._contract import validate
from ...module_utils._contract.document import Document
from ...module_utils._contract.run_folder import RunNameError, plain_run_name
from ...module_utils._kit.files import read_bytes, write_whole
from ...module_utils._preflight.predict import comparison_text
from ...module_utils._run.collected import ReportError, host_folder
from ...module_utils._run.find import PATTERNS, SMALL, RunFile, matches, stamped, step_of
from ...module_utils._run.report import make_report
from .._runs import Answers, newest_model, why_no_answer
from .carrier import Call, across_sleep, decoded

# Where checkpoints of trainings go that a host has set aside.
EARLIER = "earlier"


class CopyError(Exception):
    """A file that does not match, or leads out of the folder; the text is for the user."""


def place_of(folder: Path, path: str) -> Path:
    """The destination of a file from a host; rejects files that do not belong to a run, or lead out of the folder."""
    try:
        is_one = matches(validate.file_path(path), PATTERNS)
    except validate.InvalidHostData:
        is_one = False
    if not is_one:
        raise CopyError(f"the host offers {path!a:.200}, which is not a run file; {validate.STILL}")
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise CopyError(f"{path} leads out of {folder} through a symlink; remove that link")
    return folder / path


def fetch(call: Call, run_dir: str, one: RunFile, place: Path) -> None:
    """Copy a file with the connection plugin; it gets its name once complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.new-{os.getpid()}")
    try:
        across_sleep(call.action, lambda: call.action._connection.fetch_file(f"{run_dir}/{one['path']}", str(beside)))
        # The others may have been written meanwhile.
        if beside.stat().st_size != one["size"] and not matches(one["path"], SMALL):
            raise CopyError(f"{one['path']} came with {beside.stat().st_size} of {one['size']} bytes")
        # The host's own stamp; while it is the same, so is the file.
        os.utime(beside, (one["mtime"], one["mtime"]))
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def set_aside_beyond(folder: Path, model: Path) -> None:
    """Move checkpoints of steps later than the newest collected one to EARLIER/NUMBER/.

    They belong to a training that the host set aside; code that picks the highest step would use them.
    """
    later = [path for path in model.parent.iterdir() if step_of(path.name) > step_of(model.name)]
    if later:
        numbered = (folder / EARLIER / str(number) for number in itertools.count(1))
        aside = next(place for place in numbered if not place.exists())
        aside.mkdir(parents=True)
        for path in later:
            path.rename(aside / path.name)


def bring(call: Call, run_dir: str, offered: Sequence[RunFile], folder: Path) -> list[str]:
    """Copy what has changed; returns the files that were (or in check mode would be) written."""
    places = {place_of(folder, one["path"]): one for one in offered}
    # All checkpoints there count, not just the newest: an earlier training may have reached a higher step.
    new = {place: one for place, one in places.items() if stamped(str(folder), one["path"]) != one}
    if not call.check:
        for place, one in new.items():
            fetch(call, run_dir, one, place)
        for place in (place for place in new if place.suffix == ".pt"):
            set_aside_beyond(folder, place)
    return sorted(one["path"] for one in new.values())


def run_files(call: Call, found: Answers, dest: str, **params: Any) -> dict[str, object]:
    """Copy the new files of a run to `dest`/RUN/HOST; found: what run_info returned by host, params: those of the verb on the host.

    The newest checkpoint comes from the host that came furthest in the newest training of the run.
    """
    own = found.get(call.host) or {}
    if not own.get("run"):
        # A run can finish while a host is off; its files are collected once it is back.
        why = f"{why_no_answer(own)}; collect again when it answers, the rest is kept"
        return {"run": None, "show": f"{call.host}: nothing was brought from there, since {why}."}
    arguments = call.located({**params, "checkpoints": newest_model(found).get("host") == call.host})
    told = decoded(call.ask("run_files", **arguments), {"files": list[RunFile]}, call.host)
    if told.get("failed"):
        return told
    if told.get("run") is None:
        return {"changed": False, "run": None, "folder": None, "files": []}
    # It becomes a folder here, from an untrusted source.
    name = arguments.get("run") or told["run"]
    try:
        folder = Path(dest).expanduser().absolute() / plain_run_name(name) / host_folder(call.host)
        written = bring(call, validate.absolute_path(told.get("run_dir")), told["files"], folder)
    except (CopyError, RunNameError, validate.InvalidHostData, OSError) as error:
        message = f"Files of the run {str(name)[:80]!r} could not be copied from {call.host}: {error}"
        return {"failed": True, "msg": message}
    return {"changed": bool(written), "run": name, "folder": str(folder), "files": written}


def report(
    call: Call, found: Answers, brought: Mapping[str, Document | None], run: str, dest: str, page: str, compare: str
) -> dict[str, object]:
    """Write the page about a collected run to dest/RUN/report.html, compared with others in dest (compare: their names).

    found and brought: what run_info and run_files returned by host; page: the folder of its parts.
    """
    runs = [str(one["run"]) for one in brought.values() if one and one.get("run")]
    missing = [host for host, one in found.items() if not (one or {}).get("run")]
    if not runs and missing:
        nobody = f"no host that answers has the run{run and ' ' + run}, and {', '.join(missing)} did not answer"
        return {"failed": True, "msg": f"Nothing was collected: {nobody}."}
    if not runs:
        return {"show": "No host has a run to collect from."}
    file = Path(dest, runs[0], "report.html")
    told: dict[str, object] = {"dest": str(file), "show": f"report: {file} (the files of each rank are beside it)"}
    if call.check:
        return told
    names = [runs[0], *(name.strip() for name in compare.split(",") if name.strip())]
    try:
        data = make_report([str(Path(dest, name)) for name in names], page, comparison_text).encode()
        changed = read_bytes(str(file)) != data
        if changed:
            write_whole(str(file), data)
    except (ReportError, OSError) as error:
        return {"failed": True, "msg": f"The report {file} could not be made. {error}"}
    return {**told, "changed": changed}
