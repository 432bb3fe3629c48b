# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long eight hosts take to receive a data set from a ninth, compared with one host alone.

    python bench/shards.py                    # 96 MB at 100 Mbit/s: one host, eight, eight with a slow one, eight with one that dies
    python bench/shards.py --mbit 400 --megabytes 400

The slow host has a tenth of the rate; it is last in the chain, where the role data puts it once rates were measured, or second, and is not
waited for here. The host that dies, third in the chain, loses its server and its transfer when it has half of the data. Hosts are network
namespaces of this machine, whose links are shaped (tc), and run the module shard_sync. Needs root, and ansible-core in the interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ansible/collections"), str(ROOT / "tests/integration")]

from lan import Lan  # noqa: E402

SECRET = "of-this-transfer"
HOSTS = 8


class Transfer:
    """A source and so many hosts that lack everything."""

    def __init__(self, folder: Path, hosts: int, megabytes: int, mbit: float, slow: int | None = None) -> None:
        self.folder, self.numbers = folder, range(1, hosts + 1)
        self.lan = Lan(folder / "lan", hosts + 1)
        for number in range(hosts + 1):
            rate = f"{mbit / 10 if number == slow else mbit}mbit"
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
            # What the host sends, and what it receives.
            self.lan.run(number, "tc", "qdisc", "add", "dev", "eth0", *shape)
            self.lan._in(self.lan.switch, "tc", "qdisc", "add", "dev", f"p{number}eth0", *shape)
        first = folder / "h0"
        (first / "tokenizer").mkdir(parents=True)
        for name in ("tokenizer.pkl", "token_bytes.pt"):
            (first / "tokenizer" / name).write_bytes(b"tiny")
        for number in range(4):
            (first / f"shard_{number}.parquet").write_bytes(os.urandom(megabytes * 250_000))
        self.bytes = megabytes * 1_000_000
        self.manifest = self.module(0, state="described")["manifest"]
        self.servers = [self.serve(number) for number in range(hosts + 1)]

    def module(self, number: int, **options: Any) -> dict[str, Any]:
        told = self.lan.module(number, "shard_sync", path=str(self.folder / f"h{number}"), host=f"h{number}", **options)
        assert not told.get("failed"), told["msg"]
        return told

    def serve(self, number: int) -> dict[str, Any]:
        allow = [f"10.9.0.{one + 1}" for one in range(len(self.numbers) + 1)]
        address = {"address": allow[number], "allow": allow}
        return self.module(number, state="served", manifest=self.manifest, secret=SECRET, **address)

    def run(self, dies: int | None = None) -> dict[int, float]:
        """Seconds until each host has everything."""
        begun, took = time.monotonic(), {}
        peers = [one["server"] for one in self.servers]

        def pull(number: int) -> None:
            try:
                told = self.module(
                    number, manifest=self.manifest, peers=peers, secret=SECRET, address=f"10.9.0.{number + 1}"
                )
            except AssertionError:
                if number != dies:
                    raise
                return
            took[number] = time.monotonic() - begun
            print(f"  h{number} after {took[number]:.1f} s, {told['from']}", file=sys.stderr)

        pulls = [threading.Thread(target=pull, args=(number,)) for number in self.numbers]
        for one in pulls:
            one.start()
        if dies:
            folder = self.folder / f"h{dies}"
            while sum(path.stat().st_size for path in folder.glob("*shard_*")) < self.bytes / 2:
                time.sleep(0.05)
            # Its processes are all that run in its namespace.
            pids = subprocess.run(
                ["ip", "netns", "pids", self.lan.names[dies]], capture_output=True, text=True, check=True
            )
            subprocess.run(["kill", "-9", *pids.stdout.split()], check=True)
        for one in pulls:
            one.join()
        return took


def measure(args: argparse.Namespace, hosts: int, slow: int | None = None, dies: int | None = None) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        transfer = Transfer(Path(folder), hosts, args.megabytes, args.mbit, slow)
        try:
            return transfer.run(dies)
        finally:
            transfer.lan.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--mbit", type=float, default=100.0)
    args = parser.parse_args()
    rows = []
    for what, options in {
        "one host": {"hosts": 1},
        "eight hosts": {"hosts": HOSTS},
        "seven hosts, and behind them one at a tenth of the rate": {"hosts": HOSTS, "slow": HOSTS},
        "seven hosts, and among them one at a tenth of the rate": {"hosts": HOSTS, "slow": 2},
        "seven hosts, and among them one that dies half-way": {"hosts": HOSTS, "dies": 3},
    }.items():
        print(what, file=sys.stderr)
        took = measure(args, **options)
        there = [seconds for number, seconds in took.items() if number != options.get("slow")]
        assert len(there) == options["hosts"] - ("slow" in options or "dies" in options)
        rows.append((what, max(there)))
    print(f"{args.megabytes} MB at {args.mbit:g} Mbit/s\n\n| who receives | seconds | of one host's |\n|---|---|---|")
    for what, seconds in rows:
        print(f"| {what} | {seconds:.1f} | {seconds / rows[0][1]:.2f} |")


if __name__ == "__main__":
    main()
