# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""scripts.chat_sft: what it learns from conversations, alone and together, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranks
import reference
import torch
from trainings import DATA, FLAGS, Job

from nanochat.data import tokenizer
from nanochat.data.conversation import ChatLoader, PackedRows, Talks, epoch_batches, pack, render
from nanochat.data.dataloader import Cursor
from nanochat.kit.common import DataError
from nanochat.kit.settings import ChatSettings, Settings
from nanochat.model.ops import IGNORED
from nanochat.run.fine_tuning import FineTuning

TALKS = ranks.HERE.parents[1] / "trainer" / "data" / "conversations.jsonl"
LENGTH = 64
STEPS = 6


@pytest.fixture(scope="module")
def talks() -> Talks:
    return Talks(TALKS, tokenizer.load(DATA / "tokenizer"))


def test_a_step_is_packed_of_whole_conversations_and_resumed_by_its_position(talks: Talks) -> None:
    loader = ChatLoader(talks, 6, LENGTH)
    for dummy in range(12):
        loader.next_batch()
    assert loader.position()["epoch"] > 1
    again = ChatLoader(talks, 6, LENGTH, loader.position())
    assert torch.equal(again.next_batch()[0], loader.next_batch()[0])


def test_each_conversation_comes_once_in_an_epoch_and_only_answers_are_targets(talks: Talks) -> None:
    wanted: list[int] = []
    for number in range(len(talks)):
        ids, said = render(talks.tokenizer, talks.messages(number))
        wanted += [token for token, learn in zip(ids, said, strict=True) if learn]
    found: list[int] = []
    batches = list(epoch_batches(talks, 2, 256))
    for dummy, targets in batches:
        found += targets[targets != IGNORED].tolist()
    assert sorted(found) == sorted(wanted)
    assert len(batches) > 1


def test_an_epoch_has_as_many_steps_as_it_takes_to_read_all_conversations(talks: Talks) -> None:
    stage, length = object.__new__(FineTuning), LENGTH
    stage.talks, stage.settings = talks, ChatSettings(conversations=str(TALKS))
    config: Any = None
    settings = Settings(total_batch_size=2 * length, max_seq_len=length, num_iterations=-1)
    steps = stage.plan(settings, config).num_iterations
    loader = ChatLoader(talks, 2, length)
    epochs = [loader.next_batch() and loader.position()["epoch"] for dummy in range(steps + 1)]
    assert epochs[: steps - 1] == [1] * (steps - 1) and epochs[-1] == 2


def test_a_text_that_cannot_be_tokenized_is_named(talks: Talks, tmp_path: Path) -> None:
    path = tmp_path / "blanks.jsonl"
    path.write_text(TALKS.read_text().splitlines()[0] + "\n" + json.dumps(
        [{"role": "user", "content": " " * 1_200_000}, {"role": "assistant", "content": "Yes."}]
    ))  # fmt: skip
    with pytest.raises(
        DataError,
        match=r"^conversation 2 of .*blanks.jsonl: a text cannot be tokenized \(it has 900000 blanks in a row",
    ):
        Talks(path, talks.tokenizer).rendered(1, 64)


@pytest.mark.parametrize(("counted", "wanted"), [(9, 9), (0, 1)])
def test_a_loss_is_the_mean_over_the_targets(counted: int, wanted: int) -> None:
    targets = torch.tensor([7] * counted + [IGNORED] * 3)
    batch = PackedRows(targets, targets, Cursor(0, 0, 1, 0))
    assert FineTuning.targets(object.__new__(FineTuning), 3, batch) == wanted


def test_a_conversation_that_is_too_long_keeps_its_beginning(talks: Talks, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps([{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "on " * 99}]))
    packed = pack(Talks(path, talks.tokenizer), 1, 0, 1, LENGTH)
    assert (packed.targets != IGNORED).sum() > LENGTH // 2 and packed.cursor == Cursor(0, 0, 2, 0)
    path.write_text(json.dumps([{"role": "user", "content": "go " * 99}, {"role": "assistant", "content": "on"}]))
    with pytest.raises(DataError, match=r"no conversation of .* has an assistant token in its first 65 tokens"):
        pack(Talks(path, talks.tokenizer), 1, 0, 1, LENGTH)


def test_the_masked_loss_and_its_gradients_are_those_of_a_plain_computation(talks: Talks) -> None:
    """The plain model takes the mean over all rows at once; the training pass gets them in unequal parts."""
    model = reference.model_of(sequence_len=LENGTH, vocab_size=talks.tokenizer.vocab_size)
    packed = pack(talks, 1, 0, 4, LENGTH)
    wanted_loss, wanted = reference.autograd(model, [(packed.inputs, packed.targets)])
    parts = list(zip(packed.inputs.split([3, 1]), packed.targets.split([3, 1]), strict=True))
    loss, got = reference.trained(model, parts)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    reference.close(got, wanted, 1e-4)


# -- whole runs


class Chat(Job):
    """A fine-tuning in the folders of a base model's run."""

    def argv(self, flags: Sequence[str]) -> list[str]:
        # The second rank cannot know the model's shape, because it has no base checkpoint.
        shape = ("depth", "aspect-ratio", "head-dim", "max-seq-len", "device-batch-size", "total-batch-size", "kernels")
        model = [word for name in shape for word in (f"--{name}", str(FLAGS[f"--{name}"]))]
        own = [
            "--model-tag", "d3", "--conversations", str(TALKS), "--val-conversations", str(TALKS), "--num-iterations", str(STEPS),
            "--timeout-seconds", "20", "--eval-every", "3", "--sample-every", "-1",
        ]  # fmt: skip
        return ["-m", "scripts.chat_sft", *model, *own, *flags]

    def checkpoints(self, rank: int) -> Path:
        return self.base(rank) / "chatsft_checkpoints" / "d3"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, on the first host only."""
    folder = tmp_path_factory.mktemp("base")
    Job(folder, 1).run("--num-iterations", "3")
    return folder


def test_two_ranks_learn_what_one_learns_and_go_on_to_the_bit(base: Path, tmp_path: Path) -> None:
    for world in (1, 2):
        shutil.copytree(base, tmp_path / str(world), symlinks=True)
    alone, job = Chat(tmp_path / "1", 1), Chat(tmp_path / "2", 2)
    alone.run()
    said = job.run("--save-every", "3")
    assert "Starting from the base model of step 3" in said[0]
    losses = job.losses()[-STEPS:]
    assert losses == pytest.approx(alone.losses()[-STEPS:], rel=1e-4)
    assert losses[-1] < losses[0]
    assert [event["val_bpb"] for event in job.events("eval")] == pytest.approx(
        [event["val_bpb"] for event in alone.events("eval")], rel=1e-4
    )
    digest = {job.events("digest", rank)[-1]["digest"] for rank in range(2)}
    job.damage(STEPS)
    job.run("--resume")
    assert job.events("start")[-1]["resumed_from"] == 3
    base_id = job.events("start")[0]["training"]
    started = job.events("start")
    assert [event["base"] for event in started[-2:]] == [{"training": base_id, "step": 3}] * 2
    assert started[-1]["training"] == started[-2]["training"] != base_id
    assert {job.events("digest", rank)[-1]["digest"] for rank in range(2)} == digest and len(digest) == 1


def test_bad_conversations_and_base_models_are_refused(base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(TALKS.read_text() + '[{"role": "user", "content": "x"}]\n')
    shutil.copytree(base, tmp_path / "run", symlinks=True)
    job, nothing = Chat(tmp_path / "run", 1), Chat(tmp_path / "nothing", 1)
    for where, flags, told, cause in (
        (job, ("--conversations", str(broken)), "line 42: it must be a list of", "bad-data"),
        (job, ("--depth", "2"), "has n_layer 3, but this run has 2", "bad-checkpoint"),
        (nothing, (), "no rank has a base checkpoint in", "bad-checkpoint"),
    ):
        (result,) = where.fails(*flags)
        assert told in result.err, result.err
        assert where.events("end")[-1]["cause"] == cause
        assert not list(where.checkpoints(0).glob("model_*"))
