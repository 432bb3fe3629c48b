# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replays the pinned behaviour of the module peer_firewall on real firewalls: tests/pins/firewall/replay.sh [--write] [CASE...].

Each case plays in a container of its own (cases.py), as root and without. pinned.json holds what was seen; a difference
is printed and is an error, unless --write takes it as the new behaviour.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ansible
from cases import CASES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PINNED = HERE / "pinned.json"


def played(name: str) -> Any:
    """What the case showed."""
    site = Path(ansible.__file__).parents[1]
    # The module's library as Ansible would send it, for the container's own Python.
    binds = [f"{ROOT}:/checkout/ansible_collections/nanochat/ddp:ro", f"{site}/ansible:/site/ansible:ro"]
    volumes = [word for bind in binds for word in ("--volume", bind)]
    argv = [
        "podman",
        "run",
        "--rm",
        "--init",
        "--network=none",
        "--cap-add=NET_ADMIN,NET_RAW",
        *volumes,
        "--env=PYTHONPATH=/checkout:/site",
    ]
    case = "/checkout/ansible_collections/nanochat/ddp/tests/pins/firewall/cases.py"
    done = subprocess.run(
        [*argv, os.environ["TEST_IMAGE"], "python3", "-B", case, name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": (done.stdout + done.stderr).splitlines()[-12:]}
    return json.loads(done.stdout)


def lines(value: Any) -> list[str]:
    return json.dumps(value, indent=1, ensure_ascii=False).splitlines()


def main(words: list[str]) -> int:
    """Print the differences; 1 if there are any."""
    names = [word for word in words if word != "--write"] or list(CASES)
    pinned = json.loads(PINNED.read_text(encoding="utf-8")) if PINNED.exists() else {}
    with ThreadPoolExecutor(2) as pool:
        seen = dict(zip(names, pool.map(played, names), strict=True))
    different = [name for name in names if seen[name] != pinned.get(name)]
    for name in different:
        print(
            *difflib.unified_diff(
                lines(pinned.get(name)), lines(seen[name]), f"{name}: pinned", f"{name}: now", lineterm="", n=6
            ),
            sep="\n",
        )
    if "--write" in words:
        PINNED.write_text(json.dumps({**pinned, **seen}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(names) - len(different)} of {len(names)} cases as pinned")
    return int(bool(different) and "--write" not in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
