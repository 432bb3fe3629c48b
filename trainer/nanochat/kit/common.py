# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shared basics: the user error, folders and ranks from the environment, number types, memory."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from nanochat.rules.causes import Cause
from nanochat.rules.stages import BASE

# Linux's names of instructions for native bfloat16 products (x86, then Arm).
BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")

# The process name of a rank, by which the collection recognises one.
RANK_NAME = "nanochat-rank"

# The current environment; tests pass their own.
ENVIRON: Mapping[str, str] = MappingProxyType(os.environ)


class UserError(Exception):
    """An error that the user can fix; its text is one complete sentence and the only output.

    blames: the ranks at fault, as far as is known; None stands for the rank that raises.
    """

    usual = Cause.BAD_SETTINGS

    def __init__(self, text: str, cause: Cause | None = None, blames: Sequence[int] | None = None) -> None:
        # It may quote a file or another rank, and goes to a terminal.
        super().__init__("".join(character if character.isprintable() else " " for character in text))
        self.cause, self.blames = cause or self.usual, blames


class DataError(UserError):
    """Shards or a tokenizer that cannot be used."""

    usual = Cause.BAD_DATA


class BadCheckpoint(UserError):
    """A checkpoint that cannot be resumed from."""

    usual = Cause.BAD_CHECKPOINT


class Ranks(NamedTuple):
    """This process's place in the job, from torchrun."""

    rank: int
    local_rank: int
    world: int


def first_line(error: BaseException) -> str:
    """The first line of a library's message, for use in a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a command; a UserError becomes one line on stderr and code 2, never a traceback."""
    try:
        return main() or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        # A shell's code for a command ended by Ctrl-C.
        return 130


def name_process() -> None:
    """Give this rank its name in ps and top."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(RANK_NAME, encoding="ascii")


def pin_to_cores() -> None:
    """Pin this process to the processors in NANOCHAT_CORES (0,2,4), before any other thread starts.

    A missing processor makes the run slower, not wrong, so it is only reported.
    """
    text = os.environ.get("NANOCHAT_CORES", "")
    if text:
        try:
            os.sched_setaffinity(0, {int(number) for number in text.split(",")})
        except (OSError, ValueError) as error:
            print(f"NANOCHAT_CORES is {text}, which is invalid here ({error}); the kernel chooses.", file=sys.stderr)


def leave(code: int) -> NoReturn:
    """Exit at once after everything is written: unloading torch takes half a second of a core, and others wait for this exit."""
    for stream in (sys.stdout, sys.stderr):
        # None if it was closed.
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    os._exit(code)


def base_dir() -> Path:
    """The folder of tokenizer, checkpoints and reports."""
    named = os.environ.get("NANOCHAT_BASE_DIR")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "nanochat"


def data_dir() -> Path:
    """The folder of parquet shards."""
    named = os.environ.get("NANOCHAT_DATA_DIR")
    return Path(named).expanduser() if named else base_dir() / "base_data_climbmix"


def tokenizer_dir() -> Path:
    """The folder of tokenizer.pkl and token_bytes.pt."""
    return base_dir() / "tokenizer"


def checkpoint_dir(tag: str, stage: str = BASE.folder) -> Path:
    """The folder of one model's checkpoints of a stage."""
    return base_dir() / stage / tag


def writable_folder(path: Path, what: str) -> Path:
    """Create the folder if necessary and check that it is writable, so that a run cannot fail at its first save."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        cause = disk_cause(error)
        raise UserError(f"cannot write to {path}, the folder for {what}: {error.strerror or error}.", cause) from None
    return path


def disk_cause(error: OSError) -> Cause:
    """The cause for a disk error."""
    return Cause.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else Cause.DISK_FAILED


def read_ranks(environ: Mapping[str, str] = ENVIRON) -> Ranks:
    """RANK, LOCAL_RANK and WORLD_SIZE from torchrun; a single process is rank 0 of 1."""
    try:
        rank, local, world = (
            int(environ.get(k, d)) for k, d in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
        )
    except ValueError as error:
        raise UserError(f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {error}.") from None
    if not 0 <= rank < world:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={world}.")
    return Ranks(rank, local, world)


def check_device(device_type: str) -> None:
    """Refuse a device other than the CPU, by the flag of nanochat's scripts."""
    if device_type not in ("", "cpu"):
        raise UserError(f"--device-type {device_type}: this trainer trains on CPUs only; use --device-type cpu.")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's instruction set flags (empty if unknown)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = [line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features")) and ":" in line]
    return frozenset(found[0].split()) if found else frozenset()


def matmul_type(wanted: str, environ: Mapping[str, str] = ENVIRON, flags: frozenset[str] | None = None) -> str:
    """The number type of matrix products: --matmul, or what NANOCHAT_DTYPE of nanochat's scripts asks for."""
    dtype = environ.get("NANOCHAT_DTYPE", "")
    if dtype not in ("", "float32", "bfloat16"):
        raise UserError(
            f"NANOCHAT_DTYPE={dtype}: this trainer keeps all numbers in float32; use float32, or bfloat16 for matrix products."
        )
    if wanted == "auto":
        wanted = "bf16" if dtype == "bfloat16" else "fp32"
    if wanted == "bf16" and not (cpu_flags() if flags is None else flags) & set(BF16_CPU_FLAGS):
        raise UserError(
            f"bf16 products would be many times slower than fp32 on this CPU, which has none of {', '.join(BF16_CPU_FLAGS)}; "
            "use --matmul fp32."
        )
    return wanted


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may use: the machine's, or its control group's if lower."""
    limits = [meminfo(root, "MemTotal"), cgroup_bytes(root, "max")]
    return min((one for one in limits if one is not None), default=None)


def memory_available(root: Path = Path("/")) -> int | None:
    """Bytes of memory that are left for this process."""
    most, used = (cgroup_bytes(root, what) for what in ("max", "current"))
    left = [meminfo(root, "MemAvailable"), most - used if most is not None and used is not None else None]
    return min((one for one in left if one is not None), default=None)


def memory_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def meminfo(root: Path, name: str) -> int | None:
    """A line of /proc/meminfo in bytes; None where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    return None


def cgroup_bytes(root: Path, what: str) -> int | None:
    """A figure of this process's control group; None where it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int((root / f"sys/fs/cgroup/memory.{what}").read_text(encoding="ascii"))
    return None
