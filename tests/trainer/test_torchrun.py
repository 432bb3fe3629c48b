# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks below an agent of torchrun: how it ends is a sentence, and no rank outlives its agent."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
from trainings import Job

from scripts import torchrun


def start(job: Job, port: int, *flags: str) -> subprocess.Popen[str]:
    """One agent with one rank."""
    argv = ranks.agent(0, 1, port, "-m", "scripts.base_train", "--", *job.argv(flags)[2:])
    environment = ranks.agent_environment(job.environment(0))
    return subprocess.Popen(argv, cwd=ranks.TRAINER, env=environment, stderr=subprocess.PIPE, text=True)


def start_training(job: Job) -> subprocess.Popen[str]:
    """An agent whose rank trains until it is stopped."""
    agent = start(job, ranks.free_port(), "--num-iterations", "100000")
    job.wait_for_step(1)
    return agent


def rank_of(job: Job) -> int:
    return int(json.loads((job.base(0) / "heartbeat-rank0.json").read_text())["pid"])


def lines_of(agent: subprocess.Popen[str]) -> list[str]:
    """The lines that the agent and its ranks wrote to standard error."""
    error = agent.communicate(timeout=ranks.PATIENCE_SECONDS)[1]
    assert "Traceback" not in error, error
    return error.strip().splitlines()


def test_a_rank_that_fails_says_why_and_torchrun_how(tmp_path: Path) -> None:
    agent = start(Job(tmp_path, 1), ranks.free_port(), "--depth", "0")
    lines = lines_of(agent)
    assert agent.returncode == 1
    assert lines[0].startswith("error: --depth 0")
    assert re.fullmatch(r"torchrun: rank 0 \(pid \d+\) ended with exit code 2\.", lines[-1]), lines


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        agent = start(Job(tmp_path, 1), holder.getsockname()[1])
        assert re.match(r"torchrun: could not start or hold the ranks: .*EADDRINUSE", lines_of(agent)[-1])
    assert agent.returncode == 1


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_agent_reports_a_killed_rank_and_passes_on_a_signal(sent: signal.Signals, tmp_path: Path) -> None:
    """The rank gets SIGKILL, or the agent SIGTERM, on which the rank saves."""
    job = Job(tmp_path, 1)
    agent = start_training(job)
    if sent == signal.SIGKILL:
        os.kill(rank_of(job), sent)
        assert "was killed by signal 9 (SIGKILL, exitcode: -9)" in lines_of(agent)[-1]
        return
    agent.send_signal(sent)
    assert "was terminated by SIGTERM" in lines_of(agent)[-1]
    assert job.events("end")[-1]["reason"] == "stopped"
    assert list(job.checkpoints(0).glob("ckpt_*"))


STUBBORN = """
import os, pathlib, signal, sys, time
import torch
here = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *dummy: (here / "asked").touch())
signal.signal(signal.SIGINT, lambda *dummy: (here / "asked").touch())
(here / ("threads-" + os.environ["LOCAL_RANK"])).write_text(str(torch.get_num_threads()))
(here / "began").touch()
while not (here / "end").exists(): time.sleep(0.05)
"""


def start_module(folder: Path, count: int, *flags: str, **options: Any) -> subprocess.Popen[str]:
    """One agent whose ranks ignore signals; torch's limit of 30 s is 1 s here."""
    (folder / "stubborn.py").write_text(STUBBORN)
    environment = ranks.agent_environment({"PYTHONPATH": f"{ranks.TRAINER}{os.pathsep}{folder}"})
    del environment["OMP_NUM_THREADS"]
    code = "from scripts import torchrun; torchrun.SHUTDOWN_SECONDS = 1; torchrun.leave(torchrun.main())"
    words = [f"--nproc-per-node={count}", *flags, "-m", "stubborn", str(folder)]
    argv = [sys.executable, "-c", code, *ranks.agent(0, 1, ranks.free_port(), *words)[3:]]
    options = {"stderr": subprocess.PIPE, **options}
    return subprocess.Popen(argv, cwd=ranks.TRAINER, env=environment, text=True, **options)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_waits_for_the_ranks(sent: signal.Signals, tmp_path: Path) -> None:
    """A Ctrl-C after the first signal ends them; other signals change nothing."""
    agent = start_module(tmp_path, 1, "--shutdown-timeout=1")
    ranks.wait_until((tmp_path / "began").exists)
    agent.send_signal(sent)
    ranks.wait_until((tmp_path / "asked").exists)
    agent.send_signal(signal.SIGTERM)
    time.sleep(3.0)
    assert agent.poll() is None
    if sent == signal.SIGINT:
        agent.send_signal(signal.SIGINT)
    else:
        (tmp_path / "end").touch()
    lines = lines_of(agent)
    assert f"{sent.name}; waiting for the ranks to save and exit" in "\n".join(lines)
    assert f"was terminated by {sent.name}" in lines[-1] and agent.returncode == os.EX_UNAVAILABLE


def test_forked_ranks_that_share_a_host_have_the_threads_that_torchrun_chose(tmp_path: Path) -> None:
    """Also with closed output."""
    (tmp_path / "end").touch()
    agent = start_module(tmp_path, 2, preexec_fn=lambda: os.closerange(0, 2))
    lines = lines_of(agent)
    assert agent.returncode == 0, lines
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_a_rank_whose_agent_is_killed_saves_and_ends(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    agent = start_training(job)
    agent.kill()
    ranks.wait_until(lambda: bool(job.events("end")))
    assert job.events("end")[-1]["reason"] == "stopped"
    agent.communicate(timeout=ranks.PATIENCE_SECONDS)


def test_a_forked_rank_is_a_process_of_its_own_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a name and a session, and nothing of the agent's store, whose port is free once the agent is gone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    job = Job(tmp_path, 1)
    scratch = job.base(0) / "agent-0"
    (scratch / "of-one-that-was-killed").mkdir(parents=True)
    agent = start_training(job)
    rank = rank_of(job)
    assert Path(f"/proc/{rank}/comm").read_text().strip() == torchrun.RANK_NAME
    assert os.getsid(rank) == rank
    assert not sockets(rank) & sockets(agent.pid)
    assert scratch.is_dir() and not (scratch / "of-one-that-was-killed").exists()
    agent.send_signal(signal.SIGTERM)
    lines_of(agent)
    assert not scratch.exists()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("words", "log", "forked"),
    [
        (("python", "-u", "-m", "scripts.base_train", "--depth=4"), None, True),
        (("python", "-u", "script.py"), None, False),
        (("program",), None, False),
        (("numactl", "--cpunodebind=0", "python", "-u", "-m", "scripts.base_train"), None, False),
        (("python", "-u", "-m", "scripts.base_train"), "/dev/null", False),
    ],
)
def test_only_modules_whose_output_is_not_redirected_are_forked(
    words: tuple[str, ...], log: str | None, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "Forked", lambda module, more, environment: (module, *more))
    monkeypatch.setattr(torchrun.SubprocessHandler, "_popen", lambda self, args, env: args)
    rank = torchrun.RankHandler(words[0], words[1:], {}, log, None, 0, None)
    assert rank.proc == (words[3:] if forked else words)


def sockets(pid: int) -> set[str]:
    """The sockets that a process has open."""
    return {name for one in Path(f"/proc/{pid}/fd").iterdir() if (name := str(one.readlink())).startswith("socket:")}


def test_a_stop_after_the_ranks_have_ended_delays_no_other_agent(tmp_path: Path) -> None:
    """An agent whose rank has ended gets SIGTERM; the other host's agent would wait half a minute for it."""
    script, port = tmp_path / "script.py", ranks.free_port()
    script.write_text(
        "import os, pathlib, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "(here / ('began-' + os.environ['RANK'])).touch()\n"
        "while os.environ['RANK'] == '0' and not (here / 'end').exists(): time.sleep(0.05)\n"
    )
    agents = [
        subprocess.Popen(ranks.agent(node, 2, port, str(script)), cwd=ranks.TRAINER, stderr=subprocess.PIPE, text=True)
        for node in (0, 1)
    ]
    ranks.wait_until(lambda: all((tmp_path / f"began-{node}").exists() for node in (0, 1)))
    waits = Path(f"/proc/{agents[1].pid}/status")
    ranks.wait_until(
        lambda: bool(int(re.search(r"SigIgn:\s*(\w+)", waits.read_text())[1], 16) & 1 << (signal.SIGTERM - 1))
    )
    agents[1].send_signal(signal.SIGTERM)
    (tmp_path / "end").touch()
    assert [lines_of(agent) for agent in agents] == [[], []]
    assert [agent.returncode for agent in agents] == [0, 0]


def test_an_agent_does_not_wait_long_for_a_killed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own 300 s would keep a session open for as long."""
    monkeypatch.setattr(torchrun.api, "LocalElasticAgent", None)
    monkeypatch.setattr(torchrun, "parse_args", lambda argv: argparse.Namespace(log_dir=None, node_rank=0))
    monkeypatch.setattr(torchrun, "run", lambda args: None)
    assert torchrun.main() == 0
    made: Any = torchrun.api.LocalElasticAgent
    assert made.func is torchrun.Agent and made.keywords["exit_barrier_timeout"] <= 30
