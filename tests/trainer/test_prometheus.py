# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.record.prometheus import FOLDER, SERIES, Textfile, listener

# The text format (version 0.0.4) in its strict form.
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} ([-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|Inf|NaN))")
HELP = re.compile(rf"# HELP ({NAME}) ((?:[^\\\n]|\\[\\n])+)")
TYPE = re.compile(rf"# TYPE ({NAME}) (counter|gauge)")


def families(text: str) -> Iterator[tuple[str, str, str, float]]:
    """Name, type, labels and value of each metric; fails on anything outside the format."""
    assert text.endswith("\n")
    lines, seen = text[:-1].split("\n"), set()
    assert len(lines) % 3 == 0
    for helped, typed, sampled in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        help_, type_, sample = HELP.fullmatch(helped), TYPE.fullmatch(typed), SAMPLE.fullmatch(sampled)
        assert help_ and type_ and sample, (helped, typed, sampled)
        assert help_[1] == type_[1] == sample[1]
        assert sample[1] not in seen
        assert sample[1].endswith("_total") == (type_[2] == "counter")
        seen.add(sample[1])
        yield sample[1], type_[2], sample[2], float(sample[3])


def values_of(text: str) -> dict[str, float]:
    return {name.removeprefix("nanochat_"): value for name, dummy, labels, value in families(text)}


def step(number: int, **more: object) -> dict[str, object]:
    return {"kind": "step", "time": 100.0 + number, "step": number, "loss": 5.0, "seconds": 0.5, "wait_seconds": 0.25,
            "bytes_sent": 1000, "tokens_per_second": 4096.0, "memory_bytes": 2**30, **more}  # fmt: skip


def test_events_become_series_with_type_and_help(tmp_path: Path) -> None:
    file = Textfile(tmp_path, "d4", 1, now=lambda: 0.0)
    file.take({"kind": "start", "time": 1.0, "step": 0, "steps": 10, "world": 2, "generation": 3,
               "settings": {"num_iterations": -1}})  # fmt: skip
    for number in range(3):
        file.take(step(number))
    file.take({"kind": "eval", "time": 105.0, "step": 3, "val_bpb": 1.25})
    file.take({"kind": "checkpoint", "time": 106.0, "step": 3})
    text = (tmp_path / "nanochat_d4_rank1.prom").read_text()
    assert values_of(text) == {
        "running": 1, "step": 2, "steps": 10, "loss": 5, "val_bpb": 1.25, "tokens_per_second": 4096, "step_seconds": 0.5,
        "wait_seconds_total": 0.75, "sent_bytes_total": 3000, "memory_bytes": 2**30, "checkpoint_step": 3,
        "last_event_timestamp_seconds": 106, "ranks": 2, "generation": 3,
    }  # fmt: skip


@pytest.mark.parametrize("run", ["d4", 'a "quoted" \\ name', "two\nlines", 'a"b/../c', "Zürich {}=,# 1"])
def test_the_text_is_valid_to_the_letter(tmp_path: Path, run: str) -> None:
    file = Textfile(tmp_path, run, 3, now=lambda: 0.0)
    file.take({"kind": "start", "time": 1.7e9, "step": 0, "steps": 10, "world": 2, "generation": 3, "settings": {}})
    file.take(step(0, loss=1e-12, bytes_sent=1e22, wait_seconds=0.0, tokens_per_second=12345678901.5))
    file.take({"kind": "eval", "time": 1.7e9, "step": 0, "val_bpb": 1.0})
    file.take({"kind": "checkpoint", "time": 1.7e9, "step": 0})
    assert file.path.parent == tmp_path
    found = values_of(file.path.read_text(encoding="utf-8"))
    assert found.keys() == SERIES.keys()
    assert (found["loss"], found["sent_bytes_total"]) == (1e-12, 1e22)
    (labels,) = {labels for dummy, kind, labels, value in families(file.text())}
    told = re.fullmatch(r'run="(.*)",rank="3"', labels)
    assert told
    assert re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], told[1]) == run


def test_steps_are_written_at_most_once_a_second_and_the_end_at_once(tmp_path: Path) -> None:
    clock = [10.0]
    file = Textfile(tmp_path, "d4", 0, now=lambda: clock[0])
    file.take(step(0))
    file.take(step(1))
    assert values_of(file.path.read_text())["step"] == 0
    clock[0] += 1.0
    file.take(step(2))
    assert values_of(file.path.read_text())["step"] == 2
    file.take({"kind": "end", "time": 200.0, "step": 3, "reason": "finished"})
    assert values_of(file.path.read_text())["running"] == 0


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    file = Textfile(tmp_path, "d4", 0)
    file.take(step(0))
    assert [path.name for path in tmp_path.iterdir()] == ["nanochat_d4_rank0.prom"]
    assert file.path.stat().st_mode & 0o777 == 0o644


def test_a_loss_of_null_changes_nothing(tmp_path: Path) -> None:
    file = Textfile(tmp_path, "d4", 0, now=lambda: 0.0)
    file.take(step(0))
    file.take(step(1, loss=None))
    assert values_of(file.text())["loss"] == 5
    assert values_of(file.text())["step"] == 1


def test_an_unwritable_folder_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Textfile(tmp_path / "missing", "d4", 0, now=lambda: 0.0)
    file.take({"kind": "eval", "time": 1.0, "step": 0, "val_bpb": 1.0})
    file.take({"kind": "eval", "time": 2.0, "step": 0, "val_bpb": 1.0})
    assert capsys.readouterr().err.count("training continues") == 1


def test_there_is_a_listener_only_with_a_folder(tmp_path: Path) -> None:
    assert listener({}, "d4", 0) is None
    take = listener({FOLDER: str(tmp_path)}, "d4", 0)
    assert take is not None
    take(step(0))
    assert (tmp_path / "nanochat_d4_rank0.prom").exists()
