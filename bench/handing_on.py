# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a data set takes from one host to N others over links of a known rate, and how much of it the first host sends itself.

    sudo python bench/handing_on.py                              # to 1, 2, 4 and 8 hosts at 100 Mbit/s
    sudo python bench/handing_on.py --hosts 1 4 --megabytes 20 --rate 1gbit --write handing_on.json

The hosts are network namespaces of this machine on one switch; tc lets each send at the rate and no faster. Hosts that
have a file hand it on, so that the seconds ought to grow far less than the hosts; if the first sent everything to
everyone, they would grow as the hosts do. Needs root, iproute2 and a Python with ansible-core; removes the namespaces
that it made, and no others.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ansible" / "collections"))

from ansible_collections.nanochat.ddp.tests.integration.lan import Lan, able  # noqa: E402

SHARDS = 24


def fill(folder: Path, megabytes: int) -> None:
    """Shards of random bytes, which nothing can make smaller."""
    folder.mkdir()
    for number in range(SHARDS):
        (folder / f"shard_{number:05d}.bin").write_bytes(secrets.token_bytes(megabytes * 1_000_000 // SHARDS))


def shards(lan: Lan, module: str, number: int, **options: Any) -> dict[str, Any]:
    """A module for shards on one host, over its folder."""
    folder = str(lan.folder / f"h{number}")
    told = lan.module(number, f"shard_{module}", host=f"h{number}", path=folder, **options)
    if told.get("failed"):
        raise SystemExit(told["msg"])
    return told


def measure(folder: Path, count: int, megabytes: int, rate: str) -> dict[str, float]:
    """To so many hosts at once."""
    lan = Lan(folder, count + 1)
    try:
        for number in range(count + 1):
            shape = (
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256kb",
                "latency",
                "50ms",
            )
            lan.run(number, *shape)
        fill(folder / "h0", megabytes)
        manifest = shards(lan, "folder", 0, state="described", layout="files")["manifest"]
        addresses = [f"10.9.0.{number + 1}" for number in range(count + 1)]
        secret = secrets.token_hex()
        common = {"manifest": manifest, "secret": secret}
        servers = [
            shards(lan, "server", number, address=addresses[number], allow=addresses, **common)["server"]
            for number in range(count + 1)
        ]
        seconds = pull(lan, count, servers, addresses, common)
        sent = [sum(shards(lan, "server", number, state="stopped")["served"].values()) for number in range(count + 1)]
    finally:
        lan.close()
    data = sum(entry["bytes"] for entry in manifest["files"])
    return {"hosts": count, "seconds": seconds, "first_sent": sent[0] / data, "all_sent": sum(sent) / data}


def pull(lan: Lan, count: int, servers: list[dict[str, Any]], addresses: list[str], common: dict[str, Any]) -> float:
    """All hosts at the same time; the seconds until the last of them has every file."""

    def one(number: int) -> None:
        peers = [server for server in servers if server["host"] != f"h{number}"]
        shards(lan, "sync", number, layout="files", peers=peers, address=addresses[number], **common)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, count + 1)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    for number in range(1, count + 1):
        for path in sorted((lan.folder / "h0").glob("*.bin")):
            if (lan.folder / f"h{number}" / path.name).read_bytes() != path.read_bytes():
                raise SystemExit(f"{path.name} is not the same on h{number}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time from one host to many.")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--write", type=Path, help="keep the figures as JSON")
    args = parser.parse_args()
    if not able():
        raise SystemExit("this needs the right to make network namespaces (root, iproute2)")
    rows = []
    print(f"{args.megabytes} MB in {SHARDS} files, every host sends at {args.rate} at most")
    print(f"{'to hosts':>8} {'seconds':>8} {'x one':>6} {'first host sent':>16} {'all sent':>9}")
    for count in args.hosts:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), count, args.megabytes, args.rate))
        row = rows[-1]
        ratio = row["seconds"] / rows[0]["seconds"]
        print(f"{count:8} {row['seconds']:8.1f} {ratio:6.2f} {row['first_sent']:13.2f} x {row['all_sent']:7.2f} x")
    if args.write:
        args.write.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
