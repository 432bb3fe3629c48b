# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a checkout's script as one rank: finds checkpoints, and wraps what the script calls.

Nothing may be imported from our package later: `make_room` removes its name for the checkout's package.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from nanochat.join.optimizer import World
from nanochat.join.script import Script
from nanochat.kit.common import UserError, base_dir, checkpoint_dir
from nanochat.kit.settings import Settings, make_parser
from nanochat.parallel.comm import Comm
from nanochat.record.journal import Journal
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
    whose = f"{options.script} of this checkout or in how it is joined"
    return program.run_rank(settings_of(options), lambda comm, journal: run(options, comm, journal), whose=whose)


def settings_of(options: argparse.Namespace) -> Settings:
    """The script's flags that ours has too: run, depth, model tag ..."""
    parser = make_parser()
    given = ("timeout_seconds", "run_dir", "tracker", "tracker_uri")
    parser.set_defaults(**{name: getattr(options, name) for name in given})
    known = parser.parse_known_args(options.arguments)[0]
    if known.run == "dummy" and known.model_tag:
        # This name only stops the checkout from logging in to wandb.
        known.run = known.model_tag
    return Settings(**vars(known))


def run(options: argparse.Namespace, comm: Comm, journal: Journal) -> str:
    """Run the script; returns why it ended."""
    file = options.script.replace(".", "/") + ".py"
    if not Path(file).is_file():
        raise UserError(f"{Path.cwd()} has no {file}: run this in the folder of a nanochat checkout.")
    world = World(comm)
    script = Script(world, journal, options.sync, options.keep_checkpoints)
    arguments = list(options.arguments)
    got = resume.Obtained(lineage.wanted(journal.folder))
    comm.enter("resume", 0)
    if options.resume and options.script.endswith("base_train"):
        folder = checkpoint_dir(journal.settings.tag)
        got = resume.obtain(comm, journal, folder, resume.folder_leader(comm, folder))
    if got.step is not None:
        script.resumed_from, script.saved = got.step, [got.step]
        arguments.append(f"--resume-from-step={got.step}")
    script.training = resume.name_training(comm, got.training)
    if options.base_checkpoints:
        arguments.append(base_model_flag(Path(options.base_checkpoints), comm, script))
    make_room()
    script.install()
    program.stop_when_asked(lambda: setattr(script, "stop_asked", True))
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


def base_model_flag(folder: Path, comm: Comm, script: Script) -> str:
    """Put another run's newest checkpoint where the script looks for it, on every rank; returns the script's flag for the step."""
    leader = resume.folder_leader(comm, folder)
    step = resume.obtain(comm, script.journal, folder, leader, variable=lineage.BASE_TRAINING).step
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
    return f"--model-step={step}"


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
