# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations and their tokens, and talking to a checkpoint."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference import save_model, talkative

from nanochat.data import conversation
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError, exit_code
from nanochat.model.gpt import GPT
from nanochat.run import engine
from scripts import chat_cli

ASKED = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "Here."}]


@pytest.fixture
def base(base_folder: Path) -> Path:
    """A run folder with a small model of random weights."""
    model = talkative(2, 64, "L")
    for name in ("base_checkpoints/d2", "chatsft_checkpoints/d2", "base_checkpoints/t"):
        settings = {"conversations": "x"} if name.endswith("/t") else {}
        save_model(base_folder / name, 5, model, user_config=settings)
    return base_folder


def test_only_the_assistants_part_is_learnt(tokens: Tokenizer) -> None:
    ids, said = conversation.render(tokens, [{"role": "system", "content": "Be brief."}, *ASKED])
    question, answer = tokens.encode("Be brief.\n\nWhere is it?"), tokens.encode("Here.")
    special = tokens.special
    assert ids == [
        tokens.bos, special("<|user_start|>"), *question, special("<|user_end|>"),
        special("<|assistant_start|>"), *answer, special("<|assistant_end|>"),
    ]  # fmt: skip
    learnt = [token for token, wanted in zip(ids, said, strict=True) if wanted]
    assert learnt == [*answer, special("<|assistant_end|>")]
    assert conversation.to_answer(tokens, ASKED[:1])[-1] == special("<|assistant_start|>")


@pytest.mark.parametrize(
    "line",
    [
        '{"role": "user"}', "[]", "[3]", '[{"role": "user", "content": 3}, {"role": "assistant", "content": "x"}]',
        '[{"role": "robot", "content": "x"}, {"role": "assistant", "content": "x"}]', '[{"role": "user", "content": "x"}]',
        '[{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]', '[{"role": "system", "content": "x"}]', "{",
    ],
)  # fmt: skip
def test_a_broken_line_is_named_with_its_file(tokens: Tokenizer, tmp_path: Path, line: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps(ASKED) + "\n\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        conversation.Talks(path, tokens)
    why = "it is not JSON" if line == "{" else "it must be a list of"
    assert f"{path}, line 3: {why}" in str(caught.value)


def test_files_without_conversations(tokens: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    with pytest.raises(DataError, match="cannot read the conversations"):
        conversation.Talks(path, tokens)
    path.write_text("\n" * 3)
    with pytest.raises(DataError, match="has no conversations"):
        conversation.Talks(path, tokens)
    path.write_text("x\n" * 9)
    with pytest.raises(DataError, match="and 4 more broken lines"):
        conversation.Talks(path, tokens)
    path.write_text(json.dumps(ASKED) + "\n\n" + json.dumps(ASKED[:2] * 2))
    talks = conversation.Talks(path, tokens)
    assert [talks.messages(number) for number in range(len(talks))] == [ASKED, ASKED * 2]


def test_a_base_model_continues_the_text(base: Path, capsys: pytest.CaptureFixture[str], tokens: Tokenizer) -> None:
    flags = ["-i", "base", "-g", "d2", "-p", "import sys", "--max-tokens=9", "--seed=3"]
    chat_cli.main(flags)
    first = capsys.readouterr().out
    model = engine.load_model(base / "base_checkpoints/d2", 5, tokens)
    prompt = tokens.encode("import sys", bos=True)
    added = engine.generate(model, prompt, 9, 0.6, 50, 3, engine.stops(tokens))
    assert first == tokens.decode([*prompt[1:], *added]) + "\n"
    chat_cli.main([*flags[:-1], "--seed=4"])
    assert capsys.readouterr().out != first


@pytest.mark.parametrize("flags", [["-i", "sft"], ["-i", "base", "-g", "t"]])
def test_a_fine_tuned_model_answers(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    prompts = []
    generate = engine.generate

    def noting(model: GPT, prompt: list[int], *more: object) -> Iterator[int]:
        prompts.append(prompt)
        return generate(model, prompt, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "generate", noting)
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?\n/help\n/clear\nOne?\n\n/quit\nno more\n"))
    chat_cli.main([*flags, "--max-tokens=4"])
    out = capsys.readouterr().out.splitlines()
    assert len(prompts) == 3 and "it answers." in out[0]
    assert prompts[2] == prompts[0] and len(prompts[1]) > len(prompts[0])
    assert out[2] == out[-1] and any(line.startswith("Unknown command /help. Ctrl-C interrupts") for line in out)


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*dummy: object) -> Iterator[int]:
        yield 65
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "generate", stopped)
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?\n"))
    chat_cli.main(["-i", "sft"])
    assert capsys.readouterr().out.count(" [stopped]") == 2


def test_control_characters_are_not_printed(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokens: Tokenizer
) -> None:
    said = tokens.encode("a\x1b]52;c;ZXZpbA==\x07\u202eb\n")
    monkeypatch.setattr(engine, "generate", lambda *dummy, **more: iter(said))
    chat_cli.main(["-i", "sft", "-p", "One?"])
    assert capsys.readouterr().out.strip() == "a]52;c;ZXZpbA==b"


def test_a_long_conversation_is_cut_to_what_the_model_sees(base: Path, tokens: Tokenizer) -> None:
    args = Namespace(max_tokens=20)
    model = engine.load_model(base / "chatsft_checkpoints/d2", 5, tokens)
    talk = chat_cli.Dialogue(model, tokens, args, answers=True)
    for number in range(20):
        ids = talk.prompt(f"question {number}")
        talk.messages.append({"role": "assistant", "content": "yes"})
        assert len(ids) <= 64 - 20 and ids[0] == tokens.bos and ids[-1] == tokens.special("<|assistant_start|>")
    assert len(talk.prompt("word " * 100)) == 64 - 20
    assert len(chat_cli.Dialogue(model, tokens, args, answers=False).prompt("word " * 100)) == 64 - 20


def test_missing_checkpoints_and_bad_flags_are_refused(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, told in (
        ([], "there is no checkpoint in"),
        (["-g", "d9"], "there is no checkpoint named d9"),
        (["-k", "-1"], "-k/--top-k: -1 is less than 0"),
        (["--max-tokens", "0"], "--max-tokens: 0 is less than 1"),
    ):
        monkeypatch.setattr("sys.argv", ["chat_cli", *flags])
        assert exit_code(lambda: chat_cli.main(None)) == 2
        assert told in capsys.readouterr().err
