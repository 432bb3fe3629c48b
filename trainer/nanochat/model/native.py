# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kernels.c as a library: built once with an available compiler, tried in a separate process, then loaded.

A library is named by the digest of everything it depends on, and stored in __pycache__. It gets its name only after
every kernel has run in another process, so that a crashing kernel never reaches a training. It ends with its own digest: one
that was damaged since, or that others could have changed, is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanochat.kit.common import base_dir, cpu_flags

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("cc", "gcc", "clang")
LIMIT_SECONDS = 60.0
DIGEST_BYTES = 32
OWNERS = (0, os.geteuid())  # who may have made a library
ANYBODY = stat.S_IWOTH | stat.S_ISVTX
LEAST_ELEMENTS = 2**14  # per thread: processing them takes as long as waking a thread
NAMES = (
    "exponentials_fp32", "exponentials_bf16", "norm_fp32", "norm_bf16", "norm_backward", "rotate", "rotate_backward",
    "softmax", "accumulate", "muon_apply", "adamw",
)  # fmt: skip
# Runs every kernel on a row of zeros; standard library only.
CHILD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    sizes, factors = (ctypes.c_int64 * 8)(64, 1, 64, 64), (ctypes.c_float * 512)()  # rows long enough for vectors
    buffers = [ctypes.create_string_buffer(1 << 16) for dummy in range(8)]
    p = (ctypes.c_void_p * 8)(*map(ctypes.addressof, buffers))
    library.launch(getattr(library, name), ctypes.c_int64(1), ctypes.c_int64(1), p, sizes, factors)
"""


class BuildError(Exception):
    """Why there are no kernels, as a clause."""


def compiler(choice: str) -> list[str]:
    """The compiler's command: the system's, or with "zig" the ziglang wheel's."""
    if choice == "zig":
        if importlib.util.find_spec("ziglang") is None:
            raise BuildError("the Python package ziglang is not installed")
        return [sys.executable, "-m", "ziglang", "cc"]
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if found is None:
        raise BuildError("no C compiler")
    return [found]


def run(argv: Sequence[str], what: str) -> str:
    """Output of a command, which must succeed within the time limit."""
    try:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        # A compiler runs its passes in processes of their own.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise BuildError(f"{what} took longer than {LIMIT_SECONDS:.0f} s") from None
    except OSError as error:
        raise BuildError(f"{what} failed: {error.strerror or error}") from None
    if process.returncode < 0:
        raise BuildError(f"{what} was ended by signal {-process.returncode}")
    if process.returncode:
        lines = [line for line in err.splitlines() if "error" in line.lower()] or err.splitlines() or ["no word"]
        raise BuildError(f"{what} failed with code {process.returncode}: {lines[0][:200]}")
    return out


def built(choice: str, folder: Path | None = None) -> Path:
    """The file of the library for this source, compiler and CPU, built if missing or not to be trusted."""
    words = compiler(choice)
    if folder is None:
        folder = SOURCE.parent / "__pycache__" if os.access(SOURCE.parent, os.W_OK) else base_dir() / "kernels"
    parts = [SOURCE.read_text(encoding="utf-8"), run([*words, "--version"], words[0]), *FLAGS]
    parts += [platform.machine(), *sorted(cpu_flags())]
    path = folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}.so"
    if folder.exists() and (folder.stat().st_uid not in OWNERS or folder.stat().st_mode & ANYBODY == stat.S_IWOTH):
        raise BuildError(f"other users may change files in {folder}")
    if not is_sound(path):
        build(words, path)
    return path


def is_sound(path: Path) -> bool:
    """Whether a stored library is undamaged, and only this user can have changed it."""
    try:
        found, content = path.lstat(), path.read_bytes()
    except OSError:
        return False
    ours = stat.S_ISREG(found.st_mode) and found.st_uid in OWNERS and not found.st_mode & 0o022
    return ours and hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def build(words: Sequence[str], path: Path) -> None:
    """Build and try a library; several ranks of a machine may do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(".so.tmp", dir=path.parent)
        os.close(descriptor)
        fresh = Path(name)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent}: {error.strerror or error}") from None
    try:
        run([*words, *FLAGS, "-shared", "-fPIC", "-o", name, str(SOURCE), "-lm"], "the build")
        with fresh.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            # A power cut may leave the name, but never without the content.
            os.fsync(file.fileno())
        run([sys.executable, "-I", "-S", "-c", CHILD, name, *NAMES], "the trial of the library")
        fresh.chmod(0o755)
        fresh.replace(path)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        fresh.unlink(missing_ok=True)


class Library:
    """Calls kernels on tensors' memory; ctypes releases the GIL."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._launch = library.launch
            self._kernels = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in NAMES}
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from None
        self._launch.restype = None
        try:
            everything = ctypes.CDLL(None)
            team = [everything.GOMP_parallel, everything.omp_get_thread_num, everything.omp_get_num_threads]
            library.set_team(*[ctypes.cast(function, ctypes.c_void_p) for function in team])
            self.threaded = True
        except AttributeError:  # torch has another OpenMP: kernels too slow with one thread will be off
            self.threaded = False

    def __call__(
        self,
        name: str,
        rows: int,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int] = (),
        factors: Sequence[float] = (),
    ) -> None:
        """rows: split among the threads; sizes: by default the length of the first tensor's rows."""
        assert tensors[0] is not None
        width = tensors[0].size(-1)
        sizes = sizes or (width,)
        threads = min(torch.get_num_threads(), rows, rows * width // LEAST_ELEMENTS + 1) if self.threaded else 1
        self._launch(
            self._kernels[name],
            ctypes.c_int64(rows),
            ctypes.c_int64(threads),
            (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors]),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_float * len(factors))(*factors),
        )
