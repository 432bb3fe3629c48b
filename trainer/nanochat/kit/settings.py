# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every setting of a training run: one frozen dataclass, from which the command line is built.

settings = parse(sys.argv[1:]) reads and checks; asdict(settings) is what a checkpoint's meta file keeps.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from nanochat.kit.common import UserError, check_device, checkpoint_dir
from nanochat.rules import stages, ways
from nanochat.rules.model_size import SMEAR_CHANNELS, heads

Kind = TypeVar("Kind", bound="Settings")

# Larger figures are typing errors that would take all time or memory.
MOST, LARGEST, MOST_ROWS, MOST_BATCH = 2**53, 1e30, 2**24, 2**36
# Ranks may write to different places; all other settings must agree.
PER_RANK = ("kernels", "run_dir", "conversations", "val_conversations", "base_checkpoints")


def option(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    least: float = -LARGEST,
    most: float = LARGEST,
    also: float | None = None,
) -> Any:
    """One setting: its default, its --help text, its choices or limits, and a number beyond them that has a meaning of its own."""
    known = {"help": text, "choices": choices, "least": least, "most": most, "also": also}
    # Called in the body of the dataclass below, only through this function.
    return dataclasses.field(default=default, metadata=known)  # pylint: disable=invalid-field-call


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line of scripts.base_train; underscores become dashes."""

    script: ClassVar[str] = stages.BASE.script
    purpose: ClassVar[str] = "Pretrain a nanochat model"

    run: str = option("dummy", "name of the run in trackers and metrics")
    device_type: str = option("", "cpu, as nanochat's scripts say it; there is no other device")
    # Model
    depth: int = option(20, "number of layers", least=1, most=1024)
    aspect_ratio: int = option(
        64, "width of the model = depth * aspect ratio, rounded up to whole heads", least=1, most=4096
    )
    head_dim: int = option(128, "width of one attention head", least=1, most=8192)
    max_seq_len: int = option(2048, "tokens in a row", least=1, most=MOST_ROWS)
    window_pattern: str = option(
        "SSSL", "attention windows, repeated over the layers: S a quarter of the row, L all of it"
    )
    # Training length: the first one given counts
    num_iterations: int = option(-1, "optimizer steps; -1: from the next two flags", least=1, also=-1)
    target_flops: float = option(-1.0, "FLOPs to train for; -1: from the next flag")
    target_param_data_ratio: float = option(12.0, "tokens to train on per parameter")
    timed: bool = option(
        False,
        "end at a given time, NANOCHAT_ENDS in seconds since 1970; --num-iterations is then only an estimate, and the schedule "
        "reaches its end at that time",
    )
    # Optimization
    device_batch_size: int = option(32, "maximum rows per forward and backward pass of a rank", least=1, most=MOST_ROWS)
    total_batch_size: int = option(
        -1, "tokens per optimizer step over all ranks; -1: from the scaling law", least=1, most=MOST_BATCH, also=-1
    )
    embedding_lr: float = option(0.3, "learning rate of the embeddings (AdamW)", least=0)
    unembedding_lr: float = option(0.008, "learning rate of the head (AdamW)", least=0)
    weight_decay: float = option(0.28, "weight decay of the matrices (Muon)", least=0)
    matrix_lr: float = option(0.02, "learning rate of the matrices (Muon)", least=0)
    scalar_lr: float = option(0.5, "learning rate of the scalars (AdamW)", least=0)
    warmup_steps: int = option(40, "steps of learning rate warm-up", least=0)
    warmdown_ratio: float = option(0.65, "fraction of the steps with a falling learning rate", least=0, most=1)
    final_lr_frac: float = option(0.05, "final learning rate, as a fraction of the full one", least=0, most=1)
    resume_from_step: int = option(-1, "resume from the checkpoint of this step")
    # Evaluation, samples, checkpoints
    eval_every: int = option(250, "steps between evaluations; 0 or -1: never", least=-1)
    eval_tokens: int = option(80 * 524288, "tokens in one evaluation", least=1)
    core_metric_every: int = option(2000, "accepted for compatibility; CORE is not evaluated", least=-1)
    core_metric_max_per_task: int = option(500, "accepted for compatibility; CORE is not evaluated", least=-1)
    sample_every: int = option(2000, "steps between text samples; 0 or -1: never", least=-1)
    save_every: int = option(-1, "steps between checkpoints; 0 or -1: only at the end", least=-1)
    model_tag: str | None = option(None, "name of the checkpoint folder (default: d and the depth)")
    # Ours
    tracker: str = option("none", "tracker that rank 0 also sends metrics to", ("none", "mlflow", "wandb"))
    tracker_uri: str = option("", "URL of the tracking server (empty: the tracker's default)")
    sync: str = option("exact", f"how gradients are averaged: {ways.SUMMARY}", tuple(ways.WAYS))
    head: str = option(
        "auto",
        "output layer: whole (its gradient is sent), shared (each rank has a part of the "
        "vocabulary, and hidden states are sent), or auto (whichever sends less)",
        ("auto", "whole", "shared"),
    )
    head_shares: tuple[int, ...] = option(
        (), 'parts of a shared head by rank, as in "3,1" for the faster of two (default: equal parts)'
    )
    matmul: str = option(
        "auto", "matrix products: fp32, bf16, or auto (bf16 if NANOCHAT_DTYPE is bfloat16)", ("auto", "fp32", "bf16")
    )
    kernels: str = option(
        "auto",
        "work between the matrix products: auto (C kernels if the host has a compiler and they prove correct and faster), torch, or "
        "zig (the same kernels, built by the ziglang wheel)",
        ("auto", "torch", "zig"),
    )
    rank_rows: tuple[int, ...] = option((), 'rows per step of each rank, as in "6,2" (default: equal shares)')
    rebalance: bool = option(
        False, "redistribute rows and head during training when ranks are faster or slower than expected"
    )
    run_dir: str = option("", "folder of metrics-rankN.jsonl and heartbeat-rankN.json (default: $NANOCHAT_BASE_DIR)")
    timeout_seconds: float = option(300.0, "timeout when waiting for another rank", least=0.001)
    resume: bool = option(False, "resume from the newest checkpoint on any rank, or start if there is none")
    save_minutes: float = option(
        -1.0, "also save after this many minutes without a checkpoint; -1: never", least=0.0001, also=-1
    )
    save_on_loss: bool = option(
        False, "when a rank is lost, save the last finished step with this rank's part of the optimizer"
    )
    keep_checkpoints: int = option(2, "number of checkpoints to keep; -1: all", least=1, also=-1)

    @property
    def tag(self) -> str:
        """The name of this model's checkpoint folder."""
        return self.model_tag or f"d{self.depth}"


@dataclasses.dataclass(frozen=True)
class ChatSettings(Settings):
    """The command line of scripts.chat_sft: pretraining's with other defaults, and fine-tuning's own."""

    script: ClassVar[str] = stages.SFT.script
    purpose: ClassVar[str] = "Fine-tune a nanochat model on conversations"

    num_iterations: int = option(-1, "optimizer steps; -1: one epoch of the conversations", least=1, also=-1)
    weight_decay: float = option(0.0, "weight decay of the matrices (Muon)", least=0)
    warmup_steps: int = option(0, "steps of learning rate warm-up", least=0)
    warmdown_ratio: float = option(0.5, "fraction of the steps with a falling learning rate", least=0, most=1)
    final_lr_frac: float = option(0.0, "final learning rate, as a fraction of the full one", least=0, most=1)
    base_checkpoints: str = option("", "folder of the base model's checkpoints (default: base_checkpoints/TAG)")
    model_step: int = option(-1, "step of the base model; -1: the newest")
    load_optimizer: int = option(1, "start with the base model's momentum; 0: without", least=0, most=1)
    conversations: str = option("", "file with conversations, each line a JSON list of role and content")
    val_conversations: str = option("", "the same for evaluation; empty: no evaluation")
    init_lr_frac: float = option(0.8, "initial learning rate, as a fraction of pretraining's", least=0)


def parse(argv: Sequence[str]) -> Settings:
    """Parse a command line and check what is possible before the data is read."""
    settings = _parsed(Settings, make_parser(), argv)
    check(settings)
    return settings


def parse_chat(argv: Sequence[str], inherited: Callable[[Path, int], Mapping[str, object]]) -> ChatSettings:
    """The settings of a fine-tuning; `inherited` are defaults from the base checkpoint."""
    parser = make_parser(ChatSettings)
    first = _parsed(ChatSettings, parser, argv)
    folder = Path(first.base_checkpoints) if first.base_checkpoints else checkpoint_dir(first.tag)
    parser.set_defaults(**inherited(folder, first.model_step))
    settings = dataclasses.replace(_parsed(ChatSettings, parser, argv), base_checkpoints=str(folder))
    if not settings.val_conversations:
        settings = dataclasses.replace(settings, eval_every=-1)
    check(settings)
    if settings.total_batch_size == -1:
        refuse(settings, "total_batch_size", "set the tokens per step, because no base checkpoint here defines them")
    if not settings.conversations:
        raise UserError(f"--conversations: give a file to train on (python -m {settings.script} --help).")
    return settings


def _parsed(kind: type[Kind], parser: argparse.ArgumentParser, argv: Sequence[str]) -> Kind:
    values = vars(parser.parse_args(list(argv)))
    for name, value in values.items():
        # argparse's value of --flag=--.
        if isinstance(value, list):
            raise UserError(f"{flag_of(name)}: needs a value (python -m {kind.script} --help lists every flag).")
    return kind(**values)


class Parser(argparse.ArgumentParser):
    """argparse, but errors become UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists every flag).")


def make_parser(kind: type[Settings] = Settings) -> argparse.ArgumentParser:
    """The command line, one flag for each field."""
    parser = Parser(
        prog=f"python -m {kind.script}",
        description=f"{kind.purpose}, alone or under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "str": str,
        "str | None": str,
        "tuple[int, ...]": _by_rank,
    }
    for field in dataclasses.fields(kind):
        flag, text = flag_of(field.name), field.metadata["help"].replace("%", "%%")
        if field.type == "bool":
            parser.add_argument(flag, action="store_true", help=text)
            continue
        choices = field.metadata["choices"] or None
        parser.add_argument(flag, type=readers[str(field.type)], default=field.default, choices=choices, help=text)
    return parser


def _by_rank(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a list of numbers by rank such as "6,2"') from None


def at_least(least: int, kind: type[float] = int) -> Callable[[str], float]:
    """The type of a number on a script's command line."""

    def number(text: str) -> float:
        if kind(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return kind(text)

    return number


def flag_of(name: str) -> str:
    """A setting's spelling on the command line."""
    return "--" + name.replace("_", "-")


def refuse(settings: Settings, name: str, why: str) -> NoReturn:
    """Reject a setting by its flag and value."""
    value = getattr(settings, name)
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    raise UserError(f"{flag_of(name)} {shown}: {why}.")


def check(settings: Settings) -> None:
    """Reject values that are invalid for any machine and data."""
    check_device(settings.device_type)
    _check_numbers(settings)
    if settings.head_dim % 2:
        refuse(settings, "head_dim", "must be even, because rotary embeddings rotate pairs")
    width, least = heads(settings.depth, settings.aspect_ratio, settings.head_dim) * settings.head_dim, SMEAR_CHANNELS
    if width < least:
        refuse(settings, "depth", f"a model {width} wide is too narrow: the smear gate reads {least} channels")
    if not settings.window_pattern or set(settings.window_pattern.upper()) - set("SL"):
        refuse(settings, "window_pattern", "may contain only the letters S and L")
    if any(not 0 <= rows <= MOST for rows in settings.rank_rows):
        refuse(settings, "rank_rows", "a rank's rows must not be negative, or that many")
    if 0 in settings.rank_rows and settings.head != "shared":
        refuse(settings, "rank_rows", "a rank without rows needs --head shared")
    if any(not 1 <= share <= MOST for share in settings.head_shares):
        refuse(settings, "head_shares", "every rank must have a part of the vocabulary")
    if settings.head_shares and settings.head == "whole":
        refuse(settings, "head_shares", "splits the head, but --head is whole")
    if settings.num_iterations < 1 and settings.target_flops <= 0 and settings.target_param_data_ratio <= 0:
        refuse(settings, "num_iterations", "the training length is undefined; give a number of steps, FLOPs or a ratio")
    if settings.total_batch_size == -1 and settings.target_param_data_ratio <= 0:
        refuse(settings, "target_param_data_ratio", "must be more than 0 to compute --total-batch-size")
    if settings.timed and settings.script != stages.BASE.script:
        refuse(settings, "timed", "is for pretraining only; give a number of steps")
    if settings.resume and settings.resume_from_step >= 0:
        refuse(settings, "resume_from_step", "cannot be combined with --resume, which finds the step itself")
    if settings.model_tag is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", settings.model_tag):
        refuse(
            settings, "model_tag", "is a folder name and may contain only letters, digits, dots, dashes and underscores"
        )


def _check_numbers(settings: Settings) -> None:
    for field in dataclasses.fields(settings):
        value, limits = getattr(settings, field.name), field.metadata
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            refuse(settings, field.name, "is not a finite number")
        least, most = limits["least"], limits["most"] if isinstance(value, float) else min(limits["most"], MOST)
        if not least <= value <= most and value != limits["also"]:
            known = f"must be at most {most:g}" if value > most else f"must be at least {least:g}"
            refuse(settings, field.name, known + ("" if limits["also"] is None else f", or {limits['also']:g}"))


def rank_shares(settings: Settings, total_batch_size: int, world: int) -> list[int]:
    """Rows per rank and optimizer step; rejects a batch that cannot be divided."""
    length, micro = settings.max_seq_len, settings.device_batch_size
    rows, rest = divmod(total_batch_size, length)
    given = f"--total-batch-size {total_batch_size}"
    if rest or rows < world:
        raise UserError(f"{given}: not a whole number of rows of --max-seq-len {length} for {world} rank(s).")
    if shares := list(settings.rank_rows):
        if len(shares) != world:
            refuse(settings, "rank_rows", f"names {len(shares)} rank(s), but this job has {world}")
        if sum(shares) != rows:
            want = f"a step of {total_batch_size} tokens has {rows} row(s)"
            refuse(settings, "rank_rows", f"adds up to {sum(shares)} row(s), but {want}")
        return shares
    if rows % (world * micro):
        step = world * micro * length
        raise UserError(
            f"{given}: not divisible by {step} (--max-seq-len {length} * --device-batch-size {micro} * {world} rank(s)); "
            f"the nearest valid value is {max(1, round(total_batch_size / step)) * step}."
        )
    return [rows // world] * world


def shared_config(settings: Settings) -> dict[str, Any]:
    """The settings in which all ranks must agree."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in PER_RANK}
