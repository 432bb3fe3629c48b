# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Would the tests notice? Changes the code in small ways, one at a time, and runs the tests that concern it.

    python tools/mutate.py --budget 10 --seed 1 trainer/nanochat/run/resume.py      # ten mutants of one file
    python tools/mutate.py --budget 10                                          # ten of every file in TESTS
    python tools/mutate.py --list trainer/nanochat/parallel/comm.py                      # all that could be changed
    python tools/mutate.py --only 17 trainer/nanochat/parallel/comm.py                   # one of those again, with its difference

A mutant is killed if a test fails or takes too long; one that all tests pass is a survivor: a test is missing, or the
change makes no difference (then say so in lab/testing.md). The repository itself is never touched: each mutant is
made in a copy. Run it with the Python whose packages the tests need (the trainer's for trainer/).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
# Imported once, before the tests of each mutant run in a process that is forked: importing takes longer than most tests. Nothing of the
# repository may be among them.
PRELOADED = (
    "ansible.module_utils.basic", "hypothesis.strategies", "jinja2", "numpy", "pyarrow.parquet", "pytest", "rustbpe", "tiktoken", "torch",
    "yaml",
)  # fmt: skip
UNIT = "tests/unit/plugins"
ROOMS = f"{UNIT}/module_utils"
KEEPER = f"{ROOMS}/_keeper/test_keeper.py"
TRAINER_MODULES = [
    f"{UNIT}/modules/test_{name}.py" for name in ("trainer_files", "made_python", "trainer_venv", "setup_info")
]
LOST_HOST = "test_field_35_a_host_that_is_lost_is_done_without_and_let_in_again"
# Which tests concern a file or a folder of files: pytest's arguments, those that fail soonest first.
TESTS = {
    "trainer/nanochat/run/resume.py": [
        "tests/trainer/test_choose.py", "tests/trainer/test_faults.py", "tests/trainer/test_resume.py", "--deselect",
        "tests/trainer/test_resume.py::test_field_18_killed_at_random_moments_and_resumed",
    ],
    "trainer/nanochat/run/checkpoint_manager.py": ["tests/trainer/test_checkpoint_manager.py", "tests/trainer/test_faults.py"],
    # Keepers as processes take two minutes, and so come last.
    "plugins/module_utils/_keeper": [f"{ROOMS}/_keeper/test_membership.py", f"{KEEPER}::test_what_was_promised_is_kept"],
    "plugins/module_utils/_keeper/keeper.py": [f"{ROOMS}/_keeper/test_hostile_keeper.py", KEEPER],
    "plugins/module_utils/_keeper/rank.py": [f"{ROOMS}/_keeper/test_rank.py", f"{KEEPER}::{LOST_HOST}"],
    "plugins/module_utils/_keeper/talk.py": [f"{ROOMS}/_keeper/test_talk.py", f"{ROOMS}/_keeper/test_hostile_keeper.py"],
    "plugins/module_utils/_keeper/deployment.py": [f"{ROOMS}/_kit/test_host_code.py"],
    "plugins/module_utils/_keeper/plausible.py": [f"{ROOMS}/_keeper/test_hostile_keeper.py"],
    "plugins/module_utils/_kit": [f"{ROOMS}/_kit"],
    "plugins/module_utils/_kit/words.py": [f"{ROOMS}/_kit/test_words.py", f"{ROOMS}/_run/test_run_table.py"],
    "plugins/module_utils/_kit/files.py": [f"{ROOMS}/_kit/test_files.py", f"{ROOMS}/_run/test_run_folder.py"],
    "plugins/module_utils/_kit/commands.py": [f"{ROOMS}/_kit/test_commands.py"],
    "plugins/module_utils/_kit/logind.py": [f"{UNIT}/modules/test_tmux_session.py", f"{ROOMS}/_kit/test_processes.py"],
    "plugins/module_utils/_kit/arguments.py": [f"{ROOMS}/_kit/test_arguments.py"],
    "plugins/module_utils/_kit/bare.py": [f"{ROOMS}/_kit/test_commands.py", f"{ROOMS}/_kit/test_host_code.py", f"{UNIT}/action"],
    "plugins/module_utils/_kit/env_file.py": [f"{UNIT}/modules/test_env_file.py"],
    "plugins/module_utils/_kit/env_state.py": [f"{UNIT}/modules/test_env_file.py", f"{ROOMS}/_kit/test_host_code.py"],
    "plugins/module_utils/_probe": [f"{ROOMS}/_probe", f"{UNIT}/modules/test_host_info.py"],
    "plugins/module_utils/_probe/sources.py": [f"{ROOMS}/_plan/test_source_checks.py", f"{ROOMS}/_probe"],
    "plugins/module_utils/_preflight": [f"{ROOMS}/_preflight", f"{UNIT}/action/test_preflight_action.py"],
    "plugins/module_utils/_preflight/peer_check.py": [f"{UNIT}/modules/test_peer_check.py"],
    "plugins/module_utils/_preflight/peer_responder.py": [f"{UNIT}/modules/test_peer_check.py"],
    "plugins/module_utils/_preflight/setup_look.py": [f"{UNIT}/modules/test_setup_info.py", f"{ROOMS}/_preflight/test_setup.py"],
    "plugins/module_utils/_trainer": [f"{ROOMS}/_trainer", *TRAINER_MODULES],
    "plugins/module_utils/_trainer/agreement.py": [f"{UNIT}/action/test_judge_action.py"],
    "plugins/module_utils/_shards": [f"{ROOMS}/_shards", f"{UNIT}/modules/test_shard_sync.py"],
    "plugins/module_utils/_plan": [f"{ROOMS}/_plan", f"--ignore={ROOMS}/_plan/test_bad_settings.py"],
    # What preflight tells of a step is what this room expects of it.
    "plugins/module_utils/_plan/step_model.py": [f"{ROOMS}/_preflight", f"{ROOMS}/_plan", f"--ignore={ROOMS}/_plan/test_bad_settings.py"],
    "plugins/module_utils/_plan/local_choice.py": [f"{ROOMS}/_plan/test_local_choice.py", f"{ROOMS}/_preflight"],
    "plugins/module_utils/_run": [f"{ROOMS}/_run", f"--ignore={ROOMS}/_run/test_spoilt_files.py"],
    "plugins/module_utils/_run/files.py": [f"{ROOMS}/_run/test_run_files.py", f"{UNIT}/action/test_run_files_action.py"],
    "plugins/module_utils/_run/send.py": [f"{UNIT}/modules/test_run_info.py", f"{UNIT}/action/test_run_files_action.py"],
    "plugins/module_utils/_run/purge.py": [f"{UNIT}/modules/test_purge.py"],
    "plugins/module_utils/_contract/run_folder.py": [f"{ROOMS}/_run/test_run_folder.py", f"{ROOMS}/_run/test_run_state.py"],
    "plugins/module_utils/_firewall": [f"{ROOMS}/_firewall", f"{UNIT}/modules/test_peer_firewall.py"],
    "plugins/module_utils/_session": [f"{ROOMS}/_session", f"{UNIT}/modules/test_tmux_session.py"],
    "plugins/module_utils/_session/boot.py": [f"{UNIT}/modules/test_session_boot.py"],
    "plugins/module_utils/_session/launch.py": [f"{UNIT}/action/test_judge_action.py"],
    # What runs processes is tried with some of its own.
    "plugins/module_utils/_session/session.py": [f"{UNIT}/modules/test_tmux_session.py", "tests/integration/test_tmux_session.py"],
    "plugins/module_utils/_session/runner.py": [f"{ROOMS}/_session/test_runner.py", "tests/integration/test_tmux_session.py"],
    "plugins/module_utils/_doctor": [f"{ROOMS}/_doctor", f"{UNIT}/modules/test_doctor_info.py"],
    "trainer/nanochat/parallel/comm.py": ["tests/trainer/test_comm.py", "tests/trainer/test_frozen.py"],
    "trainer/nanochat/parallel/rendezvous.py": ["tests/trainer/test_comm.py"],
    "trainer/nanochat/parallel/sync.py": ["tests/trainer/test_sync.py", "tests/trainer/test_shared_head.py"],
    "trainer/nanochat/parallel/local.py": [
        "tests/trainer/test_local.py", "tests/trainer/test_faults.py::test_a_stop_of_local_steps_waits_for_no_far_meeting",
        "tests/trainer/test_faults.py::test_local_steps_go_on_with_all_that_was_saved",
    ],
    "trainer/nanochat/parallel/meeting.py": ["tests/trainer/test_meeting.py", "tests/trainer/test_local.py"],
    "trainer/nanochat/run/opening.py": ["tests/trainer/test_base_train.py", "tests/trainer/test_reshare.py"],
    "trainer/nanochat/run/setup.py": [
        "tests/trainer/test_base_train.py", "tests/trainer/test_settings.py", "tests/trainer/test_reshare.py",
    ],
    "trainer/nanochat/run/state.py": ["tests/trainer/test_base_train.py", "tests/trainer/test_reshare.py"],
    "trainer/nanochat/run/machinery.py": ["tests/trainer/test_base_train.py", "tests/trainer/test_reshare.py"],
    "trainer/nanochat/run/restore.py": ["tests/trainer/test_choose.py", "tests/trainer/test_reshare.py", "tests/trainer/test_resume.py"],
    "trainer/nanochat/run/rescue.py": ["tests/trainer/test_rescue.py"],
    "trainer/nanochat/run/reshare.py": ["tests/trainer/test_reshare.py"],
    "trainer/nanochat/run/phases.py": ["tests/trainer/test_local.py"],
    "trainer/nanochat/model/optim.py": ["tests/trainer/test_optim.py"],
    "trainer/nanochat/data/dataloader.py": ["tests/trainer/test_dataloader.py"],
}  # fmt: skip
COLLECTION = ".ansible/collections/ansible_collections/nanochat/ddp"
IGNORED = (".git", ".ansible", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".venv")
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATIONS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip
LEAST_SECONDS = 60.0


class Mutation(NamedTuple):
    """One change: which node of the tree (by its number in the walk), and what kind."""

    node: int
    kind: str
    line: int


class Verdict(NamedTuple):
    mutation: Mutation
    killed: bool
    how: str


# -- what can be changed


def mutations(tree: ast.Module) -> Iterator[Mutation]:
    """Every change that this tool knows, in the order of the file."""
    silent = said(tree)
    for number, node in enumerate(ast.walk(tree)):
        for kind in kinds(node):
            if number not in silent:
                yield Mutation(number, kind, getattr(node, "lineno", 0))


def said(tree: ast.Module) -> set[int]:
    """Nodes that only make words: type annotations, messages of errors and what is said."""
    spoken = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.JoinedStr | ast.Assert):
            parts = [node]
        elif isinstance(node, ast.ClassDef):
            parts = [keyword.value for keyword in node.keywords]
        spoken |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return {number for number, node in enumerate(ast.walk(tree)) if id(node) in spoken}


def kinds(node: ast.AST) -> Iterator[str]:
    """The ways in which one node can be changed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "swap the comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        yield "swap the operation"
    elif isinstance(node, ast.BoolOp):
        yield "swap and/or"
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "negate the condition"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "drop the call"
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield "change the constant"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return nothing"


def mutated(tree: ast.Module, mutation: Mutation) -> str:
    """The source with one change."""
    changed = copy.deepcopy(tree)
    node = next(node for number, node in enumerate(ast.walk(changed)) if number == mutation.node)
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = OPERATIONS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)
    return ast.unparse(ast.fix_missing_locations(changed)) + "\n"


# -- trying it


def copied(into: Path) -> Path:
    """A copy of the repository that may be spoilt."""
    root = into / "repository"
    shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
    (root / COLLECTION).parent.mkdir(parents=True)
    (root / COLLECTION).symlink_to(root)
    return root


def tests_of(name: str) -> list[str]:
    """Arguments of pytest for a file."""
    for known in (name, str(Path(name).parent)):
        if known in TESTS:
            return TESTS[known]
    # A module has a test of its name, a file of module_utils those of its room.
    path = Path("tests/unit") / name
    tests = (
        path.with_name(f"test_{path.name}") if (ROOT / path.with_name(f"test_{path.name}")).exists() else path.parent
    )
    return [str(tests)] if (ROOT / tests).exists() else []


def passes(root: Path, tests: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Whether all tests pass in time, and what they said last."""
    said = root.parent / "said"
    pid = os.fork()
    if pid == 0:
        run_tests(root, tests, said)
    code, end = None, time.monotonic() + seconds
    while code is None and time.monotonic() < end:
        time.sleep(0.05)
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
    if code is None:
        os.killpg(pid, 9)
        os.waitpid(pid, 0)
        return False, f"took longer than {seconds:.0f} s"
    out = said.read_text(encoding="utf-8", errors="replace")
    return code == 0, (out.strip().splitlines() or ["no output"])[-1]


def run_tests(root: Path, tests: Sequence[str], said: Path) -> NoReturn:
    """The tests in this process, which ends with them."""
    os.setsid()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    collection = root / COLLECTION
    paths = [str(root / "trainer"), str(collection.parents[2])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1")
    os.chdir(collection)
    sys.dont_write_bytecode = True
    sys.path[:1] = ["", *paths]
    code = 1
    try:
        code = int(importlib.import_module("pytest").main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def preload() -> None:
    """Import what the tests of any file need and this Python has."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def try_file(name: str, budget: int, seed: int, quick: bool, numbers: Sequence[int] = ()) -> list[Verdict]:
    """Mutants of one file, those of these numbers or drawn by lot, and what the tests make of each."""
    source = (ROOT / name).read_text(encoding="utf-8")
    tree = ast.parse(source)
    every = list(mutations(tree))
    drawn = [every[number] for number in numbers] or random.Random(f"{seed} {name}").sample(
        every, min(budget, len(every))
    )
    drawn.sort(key=lambda mutation: mutation.line)
    tests = tests_of(name)[:1] if quick else tests_of(name)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copied(Path(folder))
        begun = time.monotonic()
        good, last = passes(root, tests, 3600)
        if not good:
            raise SystemExit(f"{name}: its tests fail as they are: {last}")
        limit = max(LEAST_SECONDS, 3 * (time.monotonic() - begun))
        for mutation in drawn:
            (root / name).write_text(mutated(tree, mutation), encoding="utf-8")
            passed, last = passes(root, tests, limit)
            verdicts.append(Verdict(mutation, not passed, last))
            tell(name, source, every.index(mutation), verdicts[-1])
    return verdicts


def tell(name: str, source: str, number: int, verdict: Verdict) -> None:
    """One line for one mutant."""
    state = "killed  " if verdict.killed else "SURVIVED"
    line = source.splitlines()[verdict.mutation.line - 1].strip()
    print(f"{state} {name}:{verdict.mutation.line} #{number} {verdict.mutation.kind}: {line[:90]}", flush=True)


def show(name: str, only: int | None) -> None:
    """All mutants of a file, or the difference that one makes."""
    source = (ROOT / name).read_text(encoding="utf-8")
    tree = ast.parse(source)
    for number, mutation in enumerate(mutations(tree)):
        if only is None:
            print(f"#{number} line {mutation.line}: {mutation.kind}")
        elif number == only:
            plain, changed = ast.unparse(tree).splitlines(), mutated(tree, mutation).splitlines()
            print("\n".join(difflib.unified_diff(plain, changed, name, name, lineterm="", n=2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files",
        nargs="*",
        default=[name for name in TESTS if name.startswith("trainer/")],
        help="default: those of the trainer",
    )
    parser.add_argument("--budget", type=int, default=10, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=1, help="which of them")
    parser.add_argument("--quick", action="store_true", help="run only the first of the tests that concern a file")
    parser.add_argument("--list", action="store_true", help="say what could be changed, and change nothing")
    parser.add_argument("--again", type=int, nargs="+", default=[], help="try the mutants of these numbers")
    parser.add_argument("--only", type=int, help="show the difference of one mutant")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.files if not (ROOT / name).is_file() or not tests_of(name)]:
        parser.error(f"no such file, or no tests that concern it: {', '.join(unknown)}")
    if arguments.list or arguments.only is not None:
        for name in arguments.files:
            show(name, arguments.only)
        return 0
    preload()
    scores = {
        name: try_file(name, arguments.budget, arguments.seed, arguments.quick, arguments.again)
        for name in arguments.files
    }
    every = [verdict for verdicts in scores.values() for verdict in verdicts]
    for name, verdicts in [*scores.items(), *([("all", every)] if len(scores) > 1 else [])]:
        print(f"{name}: {sum(verdict.killed for verdict in verdicts)} of {len(verdicts)} killed")
    return int(not all(verdict.killed for verdict in every))


if __name__ == "__main__":
    sys.exit(main())
