# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A program in place of uv: it writes down how it was called, makes an environment and puts the lock's packages into it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, pathlib, re, sys
here = pathlib.Path(__file__)
with open(here.with_name("uv-calls"), "a") as calls:
    calls.write(json.dumps({{"argv": sys.argv[1:], "environ": dict(os.environ)}}) + "\\n")
fails = here.with_name("uv-fails")
if fails.exists() and "sync" in sys.argv:
    sys.exit(fails.read_text())
if sys.argv[1] == "venv":
    venv = pathlib.Path(sys.argv[-1])
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin/python").unlink(missing_ok=True)
    (venv / "bin/python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text("home = " + os.path.dirname(os.path.realpath(sys.executable)) + "\\n")
elif sys.argv[1:3] == ["python", "install"]:
    made = pathlib.Path(sys.argv[sys.argv.index("--install-dir") + 1], "cpython-" + sys.argv[-1] + ".9", "bin")
    made.mkdir(parents=True)
    (made / "python3").symlink_to(os.path.realpath(sys.executable))
else:
    venv = pathlib.Path(sys.argv[sys.argv.index("--python") + 1]).parents[1]
    packages = venv / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages"
    for old in packages.glob("*.dist-info"):
        old.rmdir()
    for name, version in re.findall(r"^([a-z0-9-]+)={{2,3}}([^ ;\\n]+)", pathlib.Path(sys.argv[-1]).read_text(), re.M):
        info = packages / (name + "-" + version + ".dist-info")
        info.mkdir(parents=True, exist_ok=True)
        (packages / (name.partition("-")[0] + ".py")).touch()
"""


class Uv:
    """The program at its place beside an environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(PROGRAM.format(python=sys.executable))
        path.chmod(0o755)

    @property
    def calls(self) -> list[dict]:
        """Arguments and environment of each call."""
        calls = self.path.with_name("uv-calls")
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    @property
    def installs(self) -> list[dict]:
        return [call for call in self.calls if "sync" in call["argv"]]

    def fail(self, words: str = "") -> None:
        """Let it fail with these words from now on; without them it works again."""
        fails = self.path.with_name("uv-fails")
        fails.write_text(words) if words else fails.unlink()


def tag() -> str:
    """The name of the folder with wheels for this machine."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}-{os.uname().machine}"
