# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A shared head trains the same model as a whole one, with any parts, rows and passes; gathered, its parts are bit-identical
on every rank."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kill_and_resume
import pytest
import ranks
import torch
from test_sync import LENGTH, VOCABULARY, tiny_model
from torch import Tensor
from trainings import STEPS, Job

from nanochat.kit.common import Ranks, UserError
from nanochat.kit.settings import parse, shared_config
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import ModelConfig
from nanochat.model.gradients import HEAD, MATMUL_TYPES
from nanochat.model.ops import IGNORED
from nanochat.model.optim import ALL_ROWS, LearningRates, Optimizer
from nanochat.parallel.agreement import digests
from nanochat.parallel.comm import connect
from nanochat.parallel.shared_head import FIRST_TAG, SharedHead, decide_head
from nanochat.parallel.sync import make_sync
from nanochat.parallel.wire import WIRES
from nanochat.rules.schedule import StepSchedule
from nanochat.rules.shares import part_bounds, passes_of
from nanochat.rules.ways import choose_head, shared_bytes, whole_bytes
from nanochat.run.optim_file import OURS_KEY

if TYPE_CHECKING:
    from nanochat.parallel.comm import Comm

HERE = "test_shared_head"
KILLS = int(os.environ.get("KILLS", "1"))


class Case(NamedTuple):
    """rows (six in all) and parts of the head by rank; micro: rows in a pass; chunk: bytes of logits at a time."""

    mode: str
    rows: tuple[int, ...]
    parts: tuple[int, ...]
    micro: int = 1
    chunk: int = 2**27
    steps: int = 4
    matmul: str = "fp32"


CASES = [
    Case("exact", (3, 3), (1, 1), micro=3, steps=50),
    Case("exact", (2, 4), (3, 1), micro=2, chunk=2**14),
    Case("exact", (6, 0), (1, 2)),
    Case("exact", (0, 6), (1, 1), micro=6),
    Case("bf16", (4, 2), (1, 1), micro=2),
    Case("bf16", (3, 3), (1, 1), micro=3, matmul="bf16"),
    Case("exact", (2, 2, 2), (1, 1, 1), micro=2, chunk=2**14),
    Case("exact", (1, 2, 3), (1, 4, 2)),
    Case("exact", (5, 1), (2, 1), micro=3, chunk=2**14),
    Case("exact", (4, 0, 2), (1, 1, 1), micro=2),
    Case("bf16", (1, 4, 1), (2, 1, 1)),
    Case("int8", (4, 0, 2), (1, 1, 1), micro=2),
    Case("int4", (3, 3), (2, 1), micro=3),
]


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    losses: list[float]
    state: dict[str, Tensor]
    head_bytes: int


def count_head_bytes(comm: Comm) -> list[int]:
    """Grows by the bytes of each message of the head."""
    sent, send = [0], comm.send

    def counted(tensor: Tensor, to: int, tag: int, what: str) -> Any:
        sent[0] += tensor.nbytes if tag >= FIRST_TAG else 0
        return send(tensor, to, tag, what)

    comm.send = counted  # type: ignore[method-assign]
    return sent


def train(comm: Comm, case: Case, share: bool) -> Trained:
    """Some steps over rows that all ranks draw alike and share out, some of whose targets are to be ignored."""
    torch.set_num_threads(1)
    model, sent = tiny_model(), count_head_bytes(comm)
    tokens = [rows * LENGTH for rows in case.rows]
    each = passes_of(case.rows, case.micro, together=share)
    passes = [[rows * LENGTH for rows in one] for one in zip(*each, strict=True)] if share else []
    head = None
    if share:
        wire = WIRES[case.mode].hidden
        bounds = part_bounds(VOCABULARY, model.config.padded_vocab_size, case.parts)
        head = SharedHead(comm, model, bounds, passes, wire, MATMUL_TYPES[case.matmul], case.chunk)
    training = TrainingPass(model, case.matmul, head)
    optimizer = Optimizer(model, LearningRates(), case.matmul, head.rows if head else ALL_ROWS)
    sync = make_sync(case.mode, comm, training, optimizer, tokens)
    generator, losses = torch.Generator().manual_seed(5), []
    for dummy in range(case.steps):
        drawn = torch.randint(0, VOCABULARY, (sum(case.rows), LENGTH + 1), generator=generator)
        mine = drawn[sum(case.rows[: comm.rank]) :][: case.rows[comm.rank]]
        batches = [part for part in mine.split(each[comm.rank]) if len(part)]
        sync.offer_ids([part[:, :-1] for part in batches])
        token_ids, dummy_stop = sync.take_ids()
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        loss = torch.zeros(())
        for number in range(len(passes) if share else len(batches)):
            if number >= len(batches):
                training.join_pass(1 / drawn[:, 1:].numel())
                continue
            ids, targets = batches[number][:, :-1].contiguous(), batches[number][:, 1:].clone()
            targets[:, 3] = IGNORED
            on_ready = sync.on_ready if number == len(batches) - 1 else None
            loss += training.forward_backward(ids, targets, 1 / drawn[:, 1:].numel(), on_ready)
        losses.append(sync.step(loss, StepSchedule(0.5, 0.9, 0.01)))
    return finished(model, optimizer, training, sync, losses, sent[0])


def finished(
    model: Any, optimizer: Optimizer, training: TrainingPass, sync: Any, losses: list[float], sent: int
) -> Trained:
    optimizer.catch_up()
    if training.shared_head is not None:
        training.shared_head.gather()
    state = sync.whole_state()
    parts = {f"{n} {part}": t for n, one in state["muon"].items() for part, t in one.items()}
    parts |= {f"{HEAD} {part}": t for part, t in state["adamw"][HEAD].items()}
    return Trained({name: p.detach() for name, p in model.named_parameters()}, losses, parts, sent)


def train_and_print(comm: Comm, numbers: list[int], folder: str) -> None:
    for number in numbers:
        trained = train(comm, CASES[number], share=True)
        if comm.rank == 0:
            torch.save({**trained.weights, **trained.state}, Path(folder) / f"{number}.pt")
        told = {"losses": trained.losses, "digests": digests({**trained.weights, **trained.state})}
        print(json.dumps([told, trained.head_bytes]))


@functools.cache
def alone(steps: int, matmul: str) -> Trained:
    """One rank, with a whole head."""
    case = Case("exact", (6,), (1,), steps=steps, matmul=matmul)
    return train(connect(Ranks(0, 0, 1), "cpu", 5.0, {}), case, share=False)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Rank 0's weights of every case in the folder, and each rank's output."""
    folder = tmp_path_factory.mktemp("shared")
    return folder, ranks.call_cases(HERE, "train_and_print", [len(case.rows) for case in CASES], str(folder))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_field_21_ranks_train_the_model_of_a_whole_head(number: int, told: tuple[Path, list[Any]]) -> None:
    case, lines = CASES[number], told[1][number]
    assert len(lines) == len(case.rows)
    assert all(line[0] == lines[0][0] for line in lines)
    whole = alone(case.steps, case.matmul)
    found = torch.load(told[0] / f"{number}.pt", weights_only=True)
    # bf16 rounds messages or operands to eight bits; int4 sends hidden states in 8 bits with one exponent for many values.
    loose = case.mode != "exact" or case.matmul == "bf16"
    most = 0.4 if case.mode == "int4" else 0.25 if loose else 2e-3 if case.steps > 10 else 1e-4
    # Rounded products are amplified within few steps at such learning rates: only the first loss is nearly the same.
    rounded = case.matmul == "bf16"
    assert lines[0][0]["losses"][0] == pytest.approx(whole.losses[0], abs=5e-3 if loose else 1e-5)
    assert lines[0][0]["losses"] == pytest.approx(whole.losses, abs=0.1 if rounded else 3e-2 if loose else 1e-5)
    assert found.keys() == {*whole.weights, *whole.state}
    for name, expected in {**whole.weights, **whole.state}.items():
        error = float((found[name] - expected).norm() / expected.norm().clamp_min(1e-9))
        # AdamW amplifies rounding errors of a gradient near zero, as a single number's can be.
        if not rounded and (expected.numel() > 100 or not (loose or case.steps > 10)):
            assert error < most, name


def test_parts_go_by_the_weights_and_the_last_takes_the_padding() -> None:
    assert part_bounds(32768, 32768, [1, 1]) == [0, 16384, 32768]
    assert part_bounds(32768, 32768, [3, 1]) == [0, 24576, 32768]
    assert part_bounds(300, 320, [1, 1, 1]) == [0, 96, 192, 320]


@pytest.mark.parametrize(
    ("vocab_size", "padded", "weights", "rank"),
    [(100, 128, [1, 100], 0), (96, 128, [100, 1], 1), (30, 64, [1] * 3, 1)],
)
def test_a_part_without_vocabulary_is_refused(vocab_size: int, padded: int, weights: list[int], rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} would have no part of a vocabulary of {vocab_size}"):
        part_bounds(vocab_size, padded, weights)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_count_of_bytes_is_what_is_sent(number: int, told: tuple[Path, list[Any]]) -> None:
    case = CASES[number]
    tokens = [rows * LENGTH for rows in case.rows]
    wire, width = WIRES[case.mode].hidden, tiny_model().config.n_embd
    element = wire.length(1, width) * wire.dtype.itemsize / width
    for rank, line in enumerate(told[1][number]):
        assert line[1] == shared_bytes(tokens, width, rank, element) * case.steps


def sharing_saves(vocabulary: int, tokens: list[int], width: int, sync: str = "exact") -> bool:
    return choose_head("auto", vocabulary, width, tokens, sync) == "shared"


def test_the_head_is_shared_out_where_that_sends_less() -> None:
    # The trial and the real run of two hosts, and upstream's own batch.
    assert sharing_saves(32768, [1024, 1024], 256)
    assert sharing_saves(32768, [2048, 2048], 512, "bf16")
    assert not sharing_saves(32768, [262144, 262144], 512)
    assert not sharing_saves(4096, [4096, 4096], 256)
    assert sharing_saves(32768, [4096] * 6, 256)
    assert not sharing_saves(32768, [4096] * 8, 256)
    assert not sharing_saves(32768, [1024], 256)
    # int8 packs gradients, but not hidden states; int4 packs both.
    assert sharing_saves(32768, [4096, 4096], 256, "int8")
    assert not sharing_saves(32768, [8192, 8192], 256, "int8")
    assert sharing_saves(32768, [4096, 4096], 256, "int4")
    assert not sharing_saves(32768, [8192, 8192], 256, "int4")
    assert whole_bytes(32768, 256, 2) == 33554432
    assert shared_bytes([1024, 1024], 256, 0) == 2 * 1048576 + 4096 + 16384


def decided(line: str, rows: list[int]) -> str:
    settings = parse(["--max-seq-len", "64", "--device-batch-size", "1", *line.split()])
    return decide_head(settings, ModelConfig.from_depth(4, vocab_size=4096), [n * 64 for n in rows]).head


def test_auto_is_decided_by_bytes() -> None:
    assert decided("", [2, 2]) == "shared"
    assert decided("", [40, 40]) == "whole"
    assert decided("--head shared", [40, 40]) == "shared"
    assert decided("--head whole", [2, 2]) == "whole"
    assert decided("--head shared", [2]) == "whole"


@pytest.mark.parametrize(
    ("line", "rows", "words"),
    [
        ("--head-shares 3,1", [2, 2, 2], "--head-shares 3,1: names 2 rank(s), but this job has 3"),
        ("--head-shares 1,5000", [2, 2], "--head-shares 1,5000: rank 0 would have no part of a vocabulary of"),
    ],
)
def test_parts_that_do_not_fit_are_refused(line: str, rows: list[int], words: str) -> None:
    with pytest.raises(UserError) as refused:
        decided(line, rows)
    assert words in str(refused.value)


# -- whole runs


def moments(job: Job, rank: int = 0, step: int = STEPS) -> dict[str, Tensor]:
    found: dict[str, Any] = torch.load(job.checkpoints(rank) / f"optim_{step:06d}_rank{rank}.pt", weights_only=True)
    parts = {**found[OURS_KEY]["others"], rank: found["state"]}
    # The head is the optimizer's first parameter, stored by rows.
    return {key: torch.cat([parts[one][0][key] for one in sorted(parts)]) for key in ("exp_avg", "exp_avg_sq")}


def weights(job: Job, rank: int = 0, step: int = STEPS) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(job.checkpoints(rank) / f"model_{step:06d}.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("whole"), 2)
    job.run("--head", "whole")
    return job


def test_a_run_evaluates_samples_saves_and_resumes_as_one_with_a_whole_head(tmp_path: Path, whole: Job) -> None:
    job = Job(tmp_path, 2)
    often = ("--head", "shared", "--head-shares", "2,1")
    outs = job.run(*often, "--save-every", "4", "--eval-every", "6", "--eval-tokens", "500", "--sample-every", "12")
    assert "Head: shared, vocabulary rows by rank: " in outs[0]
    assert job.losses() == pytest.approx(whole.losses(), abs=1e-5)
    assert {name: t.shape for name, t in moments(job).items()} == {n: t.shape for n, t in moments(whole).items()}
    for name, tensor in weights(whole).items():
        assert float((weights(job)[name] - tensor).norm() / tensor.norm().clamp_min(1e-9)) < 0.02, name
    assert kill_and_resume.same(weights(job, 0), weights(job, 1))
    job.resumes_alike(*often)
    assert job.events("start")[-1]["resumed_from"] == 8


def test_a_run_goes_on_in_another_way_and_with_other_ranks(tmp_path: Path, whole: Job) -> None:
    Job(tmp_path, 2).run("--head", "shared", "--num-iterations", "4")
    Job(tmp_path, 2).run("--head", "whole", "--sync", "int8", "--num-iterations", "8", "--resume")
    job = Job(tmp_path, 3)
    job.run("--head", "shared", "--sync", "bf16", "--resume")
    assert [event["resumed_from"] for event in job.events("start")] == [None, 4, 8]
    assert [event["step"] for event in job.events("step")] == list(range(STEPS))
    # Steps of shorter runs had other learning rates, but no rank started anything afresh.
    assert job.losses()[4:] == pytest.approx(whole.losses()[4:], abs=0.1)


def test_a_rank_without_rows_has_its_part_of_the_head(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    flags = ("--head", "shared", "--rank-rows", "0,12", "--eval-every", "6", "--eval-tokens", "500")
    job.run(*flags, "--save-every", "4")
    job.resumes_alike(*flags)


def test_ranks_must_agree_on_the_parts() -> None:
    told = [shared_config(parse(["--head", "shared", "--head-shares", parts])) for parts in ("3,1", "1,3")]
    assert [one["head_shares"] for one in told] == [(3, 1), (1, 3)]
    assert all(one["head"] == "shared" for one in told)


@pytest.mark.long
def test_killed_at_random_moments_with_a_shared_head(tmp_path: Path) -> None:
    kill_and_resume.endure(tmp_path, KILLS, ("--head", "shared", "--head-shares", "1,2", "--sync", "int8"))
