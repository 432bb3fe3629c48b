# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Let an unmodified nanochat checkout train together on CPUs. From the checkout's folder, on every host:

    torchrun --nnodes 2 --node-rank 0 --master-addr 192.168.1.10 /path/to/trainer/scripts/join.py scripts.base_train --depth=4

The script and its flags are the checkout's own. We add what it lacks: a Gloo group, the exchanges its optimizer uses, float32
on hosts with a GPU, metrics, heartbeats, a check that all ranks hold the same weights, whole checkpoints on every host, and a
checkpoint on SIGTERM. Our flags go before the script's name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

OWN = Path(__file__).resolve().parents[1]


def own_modules() -> dict[str, Any]:
    """Import our package, then make room for the checkout's, which has the same name."""
    sys.path.insert(0, str(OWN))
    for name in ("nanochat.run.program", "nanochat.join.script"):
        importlib.import_module(name)
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("nanochat", "scripts")}


def make_room(ours: dict[str, Any]) -> None:
    """Make the checkout's packages importable."""
    # inspect caches each module's file, and fails on a package of the same name without one.
    remembered: dict[str, str] = getattr(inspect, "_filesbymodname", {})
    for name in ours:
        del sys.modules[name]
        remembered.pop(name, None)
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [str(Path.cwd()), *(entry for entry in sys.path if entry not in (str(OWN), here))]
    importlib.invalidate_caches()


def parser(ways: Sequence[str]) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="join.py", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    result.add_argument("--timeout-seconds", type=float, default=300.0, help="timeout when waiting for another rank")
    result.add_argument("--run-dir", default="", help="folder of metrics and heartbeat (default: $NANOCHAT_BASE_DIR)")
    result.add_argument("--tracker", default="none", choices=("none", "mlflow", "wandb"))
    result.add_argument("--tracker-uri", default="")
    result.add_argument("--sync", default="exact", choices=ways, help="see base_train --help")
    result.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint on any rank")
    result.add_argument(
        "--base-checkpoints",
        action="append",
        default=[],
        metavar="FOLDER",
        help="for mid_train and chat_sft: .../base_checkpoints/TAG of another run, whose newest model they continue; every rank "
        "gets it. May be repeated; folders that no rank has are skipped",
    )
    result.add_argument("--keep-checkpoints", type=int, default=2, help="number of checkpoints to keep; -1: all")
    result.add_argument("script", help="a module of the checkout: scripts.base_train")
    result.add_argument("arguments", nargs=argparse.REMAINDER, help="its own flags")
    return result


def main() -> int:
    os.environ.setdefault("NANOCHAT_DTYPE", "float32")
    ours = own_modules()
    options = parser(ours["nanochat.rules.ways"].JOINED).parse_args()
    program, common = ours["nanochat.run.program"], ours["nanochat.kit.common"]
    settings, ranks = settings_of(ours["nanochat.kit.settings"], options), common.read_ranks()
    journal, comm = ours["nanochat.record.journal"].Journal(settings, ranks), None
    try:
        check_checkout(options.script, common.UserError)
        comm = ours["nanochat.parallel.comm"].connect(
            ranks, "cpu", options.timeout_seconds, on_phase=journal.heartbeat.enter
        )
        reason = run(ours, options, settings, comm, journal)
        comm.close()
    except common.UserError as error:
        return int(program.fail(journal, comm, error))
    except KeyboardInterrupt:
        stopped = ours["nanochat.rules.causes"].Cause.STOPPED
        return int(program.fail(journal, comm, common.UserError("interrupted before its end.", stopped)))
    except BaseException as error:
        traceback.print_exc()
        return int(program.fail(journal, comm, foreseen(ours, options.script, error)))
    journal.end(reason)
    ours["nanochat.parallel.comm"].outlast_agents(comm)
    return 0


def foreseen(ours: dict[str, Any], script: str, error: BaseException) -> BaseException:
    """A sentence for an error in the checkout's code; the log has the stack above it."""
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    cause, lacking = (
        ours["nanochat.rules.causes"].Cause,
        isinstance(error, MemoryError) or "can't allocate memory" in line,
    )
    text = f"{script}: {type(error).__name__}: {line}; its stack is in the log of this rank."
    found: BaseException = ours["nanochat.kit.common"].UserError(text, cause.OOM if lacking else cause.BUG)
    return found


def settings_of(module: Any, options: argparse.Namespace) -> Any:
    """The script's flags that ours has too: run, depth, model tag ..."""
    own = ["--run-dir", options.run_dir, "--tracker", options.tracker, "--tracker-uri", options.tracker_uri]
    try:
        known, dummy = module.make_parser().parse_known_args([*options.arguments, *own])
    except Exception:
        known, dummy = module.make_parser().parse_known_args(own)
    if known.run == "dummy" and known.model_tag:
        # This name only stops the checkout from logging in to wandb.
        known.run = known.model_tag
    return module.Settings(**vars(known))


def check_checkout(script: str, error: type[Exception]) -> None:
    path = Path.cwd() / (script.replace(".", "/") + ".py")
    if not path.is_file():
        raise error(
            f"{Path.cwd()} has no {script.replace('.', '/')}.py: run this in the folder of a nanochat checkout."
        )


def run(ours: dict[str, Any], options: argparse.Namespace, settings: Any, comm: Any, journal: Any) -> str:
    """Run the script; returns why it ended."""
    collectives = ours["nanochat.join.collectives"].Collectives(comm, options.sync)
    script = ours["nanochat.join.script"].Script(comm, journal, collectives, options.sync, options.keep_checkpoints)
    script.training = ours["nanochat.run.lineage"].wanted(journal.folder)
    arguments = [*options.arguments, *resume_flags(ours, options, settings, comm, script)]
    script.training = ours["nanochat.run.resume"].name_training(comm, script.training)
    if options.base_checkpoints:
        arguments += begin_with(ours, options, comm, script)
    make_room(ours)
    script.install()
    collectives.install()
    put_around(script)
    signal.signal(signal.SIGTERM, lambda *dummy: setattr(script, "stop_asked", True))
    try:
        call(options.script, arguments, ours["nanochat.kit.common"].UserError)
    except ours["nanochat.join.script"].Stopped as stopped:
        journal.say(str(stopped))
    finally:
        collectives.uninstall()
    if script.unsaved is not None:
        raise script.unsaved
    return "stopped" if script.stopping else "finished"


def put_around(script: Any) -> None:
    """Replace functions in the checkout's modules before its scripts import them."""
    for name in ("nanochat.checkpoint_manager", "nanochat.loss_eval"):
        with contextlib.suppress(ImportError):
            script.wrap(importlib.import_module(name))


def resume_flags(ours: dict[str, Any], options: argparse.Namespace, settings: Any, comm: Any, script: Any) -> list[str]:
    """The checkout's flag to resume from the newest checkpoint, after copying that to every host."""
    named = any(flag.startswith("--resume-from-step") for flag in options.arguments)
    if not options.resume or named or not options.script.endswith("base_train"):
        return []
    if not any(flag.startswith(("--depth", "--model-tag")) for flag in options.arguments):
        raise ours["nanochat.kit.common"].UserError(
            f"--resume: set --depth or --model-tag, so that {options.script} knows which checkpoints to resume from."
        )
    resume, folder = ours["nanochat.run.resume"], ours["nanochat.kit.common"].checkpoint_dir(settings.tag)
    comm.enter("resume", 0)
    leader = resume.folder_leader(comm, folder)
    training = resume.find_training(comm, folder, script.training)
    script.training = training.id
    found = resume.choose_step(comm, folder, -1, training)
    if found is None:
        return []
    if leader == comm.rank:
        others = set(ours["nanochat.run.checkpoint_manager"].steps_in(folder)) - set(training.steps)
        ours["nanochat.run.checkpoint_manager"].set_aside(folder, others)
    source = (Path.cwd() / (options.script.replace(".", "/") + ".py")).read_text(encoding="utf-8", errors="replace")
    if "resume-from-step" not in source and "resume_from_step" not in source:
        raise ours["nanochat.kit.common"].UserError(
            f"{options.script} of this checkout has no --resume-from-step, and {folder} holds a checkpoint of step "
            f"{found.step}; start over (ddp_fresh=true), which keeps it in previous/."
        )
    resume.fetch(comm, folder, found, leader)
    script.resumed_from, script.saved = found.step, [found.step]
    return [f"--resume-from-step={found.step}"]


def begin_with(ours: dict[str, Any], options: argparse.Namespace, comm: Any, script: Any) -> list[str]:
    """Put another run's newest checkpoints where the script looks for them, on every rank; returns the script's flag for the step."""
    resume, common, begun = ours["nanochat.run.resume"], ours["nanochat.kit.common"], None
    comm.enter("resume", 0)
    for folder in (Path(one) for one in options.base_checkpoints):
        if not any(
            comm.exchange("the folders to begin with", folder.is_dir(), fits=ours["nanochat.kit.expected"].flag)
        ):
            continue
        leader, variable = resume.folder_leader(comm, folder), ours["nanochat.run.lineage"].BASE_TRAINING
        of_base = folder.parent.name == "base_checkpoints"
        wanted = ours["nanochat.run.lineage"].wanted(script.journal.folder, variable) if of_base else ""
        found = resume.choose_step(comm, folder, -1, resume.find_training(comm, folder, wanted, variable))
        if found is None:
            continue
        resume.fetch(comm, folder, found, leader)
        place(folder, common.base_dir() / folder.parent.name / folder.name, common.UserError)
        script.bases[folder.parent.name] = begun = (folder, found.step)
    if begun is None:
        raise common.UserError(
            f"no rank has a checkpoint in {' or '.join(options.base_checkpoints)}, which {options.script} needs; "
            "train a base model first."
        )
    script.journal.say(f"{options.script} continues from step {begun[1]} in {begun[0]}")
    source = (Path.cwd() / (options.script.replace(".", "/") + ".py")).read_text(encoding="utf-8", errors="replace")
    named = any(flag.startswith("--model-step") for flag in options.arguments)
    # Without it each rank would load its own newest checkpoint, whole or not.
    return [f"--model-step={begun[1]}"] if re.search("model[-_]step", source) and not named else []


def place(folder: Path, link: Path, error: type[Exception]) -> None:
    """Link a folder under another name."""
    if link.resolve() == folder.resolve():
        return
    if link.exists() and not link.is_symlink():
        raise error(f"{link} has its own checkpoints, so those of {folder} cannot be put there; move it away.")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve())


def call(name: str, arguments: list[str], error: type[Exception]) -> None:
    """Run the script as `python -m` would; an unknown flag is reported in one sentence."""

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise error(f"{name} of this checkout: {message}.")

    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign, assignment]
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise error(f"{name} ended with {ended.code}.") from None


if __name__ == "__main__":
    sys.exit(main())
