# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank is lost: what the others save, and how those who go on put it together."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
from forked import always
from kill_and_resume import same
from test_chat_sft import Chat
from test_faults import enter_folder, keep, ready
from trainings import STEPS, Job

from nanochat.kit import common
from nanochat.kit.common import Ranks
from nanochat.kit.connections import SO_MAX_PACING_RATE, connections
from nanochat.kit.settings import parse_chat
from nanochat.model import numerics
from nanochat.parallel.comm import Comm
from nanochat.record.journal import Journal
from nanochat.run import saving, state
from nanochat.run.fine_tuning import FineTuning
from nanochat.run.loop import train_step
from nanochat.run.program import CUT_OFF_SECONDS, end_when_cut_off
from nanochat.run.saving import save
from nanochat.run.setup import set_up, start_event

HERE = "test_rescue"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_field_35_the_remaining_rank_saves_and_continues_alone(number: signal.Signals, tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    processes = job.start("--save-on-loss", "--save-every", "3", slow=True)
    job.wait_for_step(4)
    processes[1].send_signal(number)
    if number == signal.SIGSTOP:
        (job.base(0) / "hang-up-rank0").write_text("the attic is not heard")
    (result,) = ranks.finish(processes[:1])
    processes[1].kill()
    ranks.finish(processes[1:])
    assert result.code == 2, result
    (step,) = [event["step"] for event in job.events("checkpoint") if event.get("alone")]
    assert f"saved step {step} to {job.checkpoints(0)} without the lost rank" in result.out
    alone = Job(job.folder, 1)
    (out,) = alone.run("--resume", "--save-on-loss")
    assert re.search(r"Momentum of \d+ of \d+ matrices was lost", out)
    assert (alone.events("start")[-1]["resumed_from"], alone.events("start")[-1]["notices"]) == (step, [])
    assert sorted(event["step"] for event in alone.events("step")) == list(range(STEPS))
    # The lost rank returns without checkpoints and joins.
    shutil.rmtree(job.checkpoints(1), ignore_errors=True)
    back = Job(job.folder, 2)
    back.run("--resume", "--save-on-loss", "--num-iterations", str(STEPS + 3))
    assert back.events("start", 1)[-1]["resumed_from"] == STEPS
    assert back.events("digest", 1)[-1]["identical"] is True


def test_a_run_that_often_loses_ranks_keeps_no_more_checkpoints_than_it_should(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for dummy in range(5):
        ranks.passed(ranks.call(HERE, "train_a_step_and_lose_the_other", 2, str(tmp_path)))
    assert job.events("start", 1)[-1]["resumed_from"] == 4
    for rank in (0, 1):
        # Two that all ranks have, and the newest: a rank alone cannot know that others have it.
        assert sorted(path.name for path in job.checkpoints(rank).glob("model*")) == [
            f"model_00000{n}.pt" for n in (3, 4, 5)
        ]


def train_a_step_and_lose_the_other(comm: Comm, folder: str) -> None:
    run = ready(comm, folder, "--save-on-loss", "--resume", "--head", "whole")
    start_event(run)
    train_step(run)
    assert str(saving.save_alone(run)).startswith("saved step ")
    run.journal.metrics.close()


def lose_within_a_message(comm: Comm, folder: str, hang_up: bool) -> None:
    run = ready(comm, folder, "--save-on-loss", "--head", "whole")
    train_step(run)
    message = torch.zeros(2**27, dtype=torch.uint8)
    if comm.rank == 1:
        for one in connections():
            one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 2**20)
        sent = comm.send(message, 0, 1, "a long message")
        time.sleep(2)
        for dummy in range(600 if hang_up else 0):
            if Job(Path(folder), 2).events("end", 0):
                break
            time.sleep(0.1)
        del sent
        os._exit(0)
    end_when_cut_off(run.journal, comm, lambda: saving.save_alone(run))
    if hang_up:
        request = run.journal.folder / "hang-up-rank0"
        threading.Timer(1.0, lambda: request.write_text("the attic is not heard")).start()
    comm.wait(comm.receive(message, 1, 1, "a long message"))


@pytest.mark.parametrize(
    ("hang_up", "why"), [(True, "lost the others (the attic is not heard)"), (False, "no heartbeat from rank 1")]
)
def test_a_rank_that_received_part_of_a_message_notices_a_closed_connection(
    hang_up: bool, why: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, 2)
    receiver = ranks.call(HERE, "lose_within_a_message", 2, str(tmp_path), hang_up)[0]
    assert receiver.code == 2 and why in receiver.err
    assert f"saved step 1 to {job.checkpoints(0)} without the lost rank" in receiver.out
    assert "Timed out" not in receiver.err


def wait_for_a_late_rank(comm: Comm, folder: str) -> None:
    run = ready(comm, folder, "--save-on-loss", "--head", "whole")
    end_when_cut_off(run.journal, comm, lambda: saving.save_alone(run))
    message = torch.full((10,), comm.rank)
    if comm.rank == 1:
        time.sleep(4 * CUT_OFF_SECONDS)
        comm.wait(comm.send(message, 0, 1, "a message"))
    else:
        comm.wait(comm.receive(message, 1, 1, "a message"))
    assert message.tolist() == [1] * 10


def test_a_rank_with_open_connections_waits_for_a_late_one(tmp_path: Path) -> None:
    ranks.passed(ranks.call(HERE, "wait_for_a_late_rank", 2, str(tmp_path)))


class LostError(Exception):
    """Stands for a lost connection."""


def lost(*dummy: object) -> None:
    raise LostError


def lose_in_an_update(comm: Comm, folder: str, sync: str, method: str) -> None:
    """In the fourth step every rank loses the others while it changes weights."""
    # The same library as in the runs that resume from this.
    numerics.try_route = always("mkl")  # type: ignore[assignment]
    run = ready(comm, folder, "--save-on-loss", "--head", "whole", "--sync", sync)
    for dummy in range(3):
        train_step(run)
    keep(run, folder)
    before = copy.deepcopy([run.weights, run.optimizer.state_dict()])
    setattr(run.sync, method, lost)
    with pytest.raises(LostError):
        train_step(run)
    assert run.sync.changing and not same(before[0], run.weights)
    assert str(saving.save_alone(run)).startswith("saved step 3 ")
    assert same(before, [run.weights, run.optimizer.state_dict()])


@pytest.mark.parametrize("sync", ["exact", "int8"])
@pytest.mark.parametrize("method", ["_take_others", "_update_small", "_block_sum"])
def test_an_interrupted_update_is_taken_back(sync: str, method: str, tmp_path: Path, uninterrupted: str) -> None:
    """Both ranks saved alone, and resume as if nothing had happened; so do three."""
    job = Job(tmp_path, 2)
    ranks.passed(ranks.call(HERE, "lose_in_an_update", 2, str(job.folder), sync, method))
    if (sync, method) == ("exact", "_take_others"):
        ranks.passed(ranks.call("test_faults", "compare_restored", 3, str(job.folder), "--resume", "--save-on-loss"))
        outs = job.run("--resume", "--save-on-loss", "--head", "whole")
        assert "Momentum of" not in outs[0]
        assert job.events("start", 1)[-1]["resumed_from"] == 3
        assert job.final_digest() == uninterrupted


def run_short_of_memory(comm: Comm, folder: str) -> None:
    setattr(state, common.memory_available.__name__, lambda: 2**20)
    run = ready(comm, folder, "--save-on-loss", "--head", "whole")
    train_step(run)
    assert run.optimizer.undo is None
    run.sync.changing = True
    assert "had begun to change the weights" in str(saving.save_alone(run))


def test_a_host_short_of_memory_trains_without_copies_and_says_so(tmp_path: Path) -> None:
    outs = ranks.passed(ranks.call(HERE, "run_short_of_memory", 2, str(tmp_path)))
    assert "A rank lost during an update costs steps: too little memory is free" in outs[0]


def test_saves_by_time(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.run("--save-minutes", "0.0001", "--keep-checkpoints", "-1")
    assert [event["step"] for event in job.events("checkpoint", 1)] == list(range(1, STEPS + 1))


def save_by_time(comm: Comm, folder: str) -> None:
    run = ready(comm, folder, "--save-minutes", "60")
    train_step(run)
    assert not run.save_wanted
    run.saved_at -= 3601
    assert run.save_wanted
    save(run, final=False)
    assert not run.save_wanted


def test_a_save_by_time_is_followed_by_as_long_without_one(tmp_path: Path) -> None:
    ranks.passed(ranks.call(HERE, "save_by_time", 1, str(tmp_path)))


def fine_tune(comm: Comm, folder: str) -> None:
    """Make four steps; then the second rank saves alone."""
    torch.set_num_threads(1)
    # The same library as in the runs that resume from this.
    numerics.try_route = always("mkl")  # type: ignore[assignment]
    enter_folder(folder, comm.rank)
    argv = Chat(Path(folder), comm.world).argv(["--head", "whole", "--save-on-loss"])[2:]
    settings = parse_chat(argv, lambda *dummy: {})
    run = set_up(settings, comm, Journal(settings, Ranks(comm.rank, comm.rank, comm.world)), FineTuning(settings))
    for dummy in range(4):
        train_step(run)
    if comm.rank == 1:
        assert "without the lost rank" in str(saving.save_alone(run))


def test_a_fine_tuning_that_lost_a_rank_resumes(tmp_path: Path) -> None:
    """It continues with the next conversations, although the first rank was lost."""
    Job(tmp_path / "base", 1).run("--num-iterations", "1")
    whole, one = Chat(tmp_path / "whole", 2), Chat(tmp_path / "one", 1)
    for job in (whole, one):
        shutil.copytree(tmp_path / "base", job.folder, symlinks=True)
    ranks.passed(ranks.call(HERE, "fine_tune", 2, str(one.folder)))
    one.base(0).rename(one.folder / "lost")
    one.base(1).rename(one.base(0))
    outs = [job.run("--resume", "--head", "whole", "--save-on-loss")[0] for job in (whole, one)]
    assert [job.events("start")[-1]["resumed_from"] for job in (whole, one)] == [None, 4]
    places = [re.findall(r"^step 0000[45].*(epoch: .*) \| total time", out, re.M) for out in outs]
    assert len(places[0]) == 2 and places[1] == places[0]
