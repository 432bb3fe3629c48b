# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The life of one rank that runs a checkout's script: connect, find checkpoints, run the script, report the end.

Nothing may be imported from our package later: `make_room` removes its name for the checkout's package.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from nanochat.join.script import Script
from nanochat.join.world import World
from nanochat.kit.common import UserError, base_dir, checkpoint_dir, name_process, read_ranks
from nanochat.kit.settings import Settings, make_parser
from nanochat.parallel.comm import Comm, connect
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.rules.ways import JOINED
from nanochat.run import lineage, program, resume

OWN = Path(__file__).resolve().parents[2]
OURS: list[ModuleType] = []  # keeps our modules alive after make_room


def flags(description: str) -> argparse.ArgumentParser:
    """Our command line, before the script's name."""
    result = make_parser(only=("timeout_seconds", "run_dir", "tracker", "tracker_uri", "resume", "keep_checkpoints"))
    result.prog, result.description = "join.py", description
    result.add_argument("--sync", default="exact", choices=JOINED, help="see base_train --help")
    result.add_argument(
        "--base-checkpoints",
        metavar="FOLDER",
        help="for chat_sft: .../base_checkpoints/TAG of another run, whose newest model it continues; every rank gets it",
    )
    result.add_argument("script", help="a module of the checkout: scripts.base_train")
    result.add_argument("arguments", nargs=argparse.REMAINDER, help="its own flags")
    return result


def launch(description: str) -> int:
    """Run the script named on the command line; returns the process's exit code."""
    options = flags(description).parse_args()
    name_process()
    settings, ranks = settings_of(options), read_ranks()
    journal, comm = Journal(settings, ranks), None
    try:
        file = options.script.replace(".", "/") + ".py"
        if not Path(file).is_file():
            raise UserError(f"{Path.cwd()} has no {file}: run this in the folder of a nanochat checkout.")
        comm = connect(ranks, "cpu", options.timeout_seconds, on_phase=journal.heartbeat.enter)
        reason = run(options, settings, comm, journal)
        comm.close()
    except UserError as error:
        return program.fail(journal, comm, error)
    except KeyboardInterrupt:
        return program.fail(journal, comm, UserError("interrupted before its end.", Cause.STOPPED))
    except BaseException as error:
        # In the checkout's code.
        traceback.print_exc()
        line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in line
        text = f"{options.script}: {type(error).__name__}: {line}; its stack is in the log of this rank."
        return program.fail(journal, comm, UserError(text, Cause.OOM if out_of_memory else Cause.BUG))
    journal.end(reason)
    return 0


def settings_of(options: argparse.Namespace) -> Settings:
    """The script's flags that ours has too: run, depth, model tag ..."""
    parser = make_parser()
    parser.set_defaults(run_dir=options.run_dir, tracker=options.tracker, tracker_uri=options.tracker_uri)
    known = parser.parse_known_args(options.arguments)[0]
    if known.run == "dummy" and known.model_tag:
        # This name only stops the checkout from logging in to wandb.
        known.run = known.model_tag
    return Settings(**vars(known))


def run(options: argparse.Namespace, settings: Settings, comm: Comm, journal: Journal) -> str:
    """Run the script; returns why it ended."""
    world = World(comm)
    script = Script(world, journal, options.sync, options.keep_checkpoints)
    script.training = lineage.wanted(journal.folder)
    arguments = list(options.arguments)
    if options.resume and options.script.endswith("base_train"):
        arguments += resume_flags(checkpoint_dir(settings.tag), comm, script)
    script.training = resume.name_training(comm, script.training)
    if options.base_checkpoints:
        arguments += base_model_flags(Path(options.base_checkpoints), comm, script)
    make_room()
    script.install()
    signal.signal(signal.SIGTERM, lambda *dummy: setattr(script, "stop_asked", True))
    with world.installed():
        script.wrap()
        call(options.script, arguments)
    return "stopped" if script.stopping else "finished"


def make_room() -> None:
    """Make the checkout's packages importable, which have the same names as ours."""
    # inspect caches each module's file, and fails on a package of the same name without one.
    remembered: dict[str, str] = getattr(inspect, "_filesbymodname", {})
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nanochat", "scripts")]:
        OURS.append(sys.modules.pop(name))
        remembered.pop(name, None)
    sys.path[:] = [str(Path.cwd()), *(entry for entry in sys.path if entry not in (str(OWN), str(OWN / "scripts")))]
    importlib.invalidate_caches()


def resume_flags(folder: Path, comm: Comm, script: Script) -> list[str]:
    """The checkout's flag to resume from the newest checkpoint, after copying that to every host."""
    comm.enter("resume", 0)
    leader = resume.folder_leader(comm, folder)
    got = resume.obtain(comm, folder, leader, script.training, say=script.journal.say)
    script.training = got.training
    if got.step is None:
        return []
    script.resumed_from, script.saved = got.step, [got.step]
    return [f"--resume-from-step={got.step}"]


def base_model_flags(folder: Path, comm: Comm, script: Script) -> list[str]:
    """Put another run's newest checkpoint where the script looks for it, on every rank; returns the script's flag for the step."""
    comm.enter("resume", 0)
    wanted, leader = lineage.wanted(script.journal.folder, lineage.BASE_TRAINING), resume.folder_leader(comm, folder)
    step = resume.obtain(comm, folder, leader, wanted, variable=lineage.BASE_TRAINING).step
    if step is None:
        raise UserError(f"no rank has a checkpoint in {folder}, which chat_sft needs; train a base model first.")
    link = base_dir() / folder.parent.name / folder.name
    if link.resolve() != folder.resolve():
        if link.exists() and not link.is_symlink():
            raise UserError(f"{link} has its own checkpoints, so those of {folder} cannot be put there; move it away.")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.resolve())
    script.base = (folder, step)
    script.journal.say(f"Fine-tuning continues from step {step} in {folder}")
    # Without it each rank would load its own newest checkpoint, whole or not.
    return [f"--model-step={step}"]


def call(name: str, arguments: list[str]) -> None:
    """Run the script as `python -m` would; an unknown flag is reported in one sentence."""

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise UserError(f"{name} of this checkout: {message}.")

    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign, assignment]
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise UserError(f"{name} ended with {ended.code}.") from None
