"""Three hosts read the same shards, whatever they had before and whatever happens to their files."""

from __future__ import annotations

import json
import subprocess

import pytest
from conftest import wait_for

BASE = {"desktop": "/home/lzw/nanochat-ddp", "laptop": "/home/xiaoxin/nanochat-ddp", "lab": "/home/lzw/nanochat-ddp"}
USER = {"desktop": "lzw", "laptop": "xiaoxin", "lab": "lzw"}
HOSTS = list(BASE)
ALL = [f"shard_{number:05d}.parquet" for number in range(201)]

COLLECTION = """
import pathlib, sys
import pyarrow as pa, pyarrow.parquet as pq
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True)
for number in range(201):
    texts = [f"document {number} {row} " + "the quick brown fox jumps over the lazy dog " * (1 + row % 7) for row in range(32)]
    pq.write_table(pa.table({"text": texts}), folder / f"shard_{number:05d}.parquet", row_group_size=8)
"""

BIG_SHARD = """/opt/trainer-venv/bin/python -c '
import random, sys
import pyarrow as pa, pyarrow.parquet as pq
texts = [random.Random(row).randbytes(int(sys.argv[1]) // 32).hex() for row in range(16)]
pq.write_table(pa.table({"text": texts}), "/srv/big/shard_00001.parquet", compression="none", use_dictionary=False)
'"""

# The tests tell one story and are played in this order.


@pytest.fixture(scope="module", autouse=True)
def collection(lab):
    """The same collection of 201 shards on the master and on a web server."""
    for host, folder in (("desktop", "/srv/collection"), ("mirror", "/srv/http")):
        lab.on(host, f"test -d {folder} || /opt/trainer-venv/bin/python -c '{COLLECTION}' {folder}")


def sums(lab, host, folder):
    said = lab.on(host, f"cd {folder} && sha256sum *.parquet")
    return {name: digest for digest, name in map(str.split, said.splitlines())}


def read_by(lab, host, run="same"):
    return sums(lab, host, f"{BASE[host]}/runs/{run}/data")


def as_user(lab, host, script):
    return lab.on(host, script, user=USER[host])


def assert_the_same_everywhere(lab):
    wanted = sums(lab, "desktop", "/srv/collection")
    assert sorted(wanted) == ALL
    for host in HOSTS:
        assert read_by(lab, host) == wanted
        # No server is left behind, and no part of a file.
        assert lab.on(host, f"find {BASE[host]}/data -name .share -o -name '*.part'") == ""


def test_field_07_master_with_201_shards_and_worker_with_4(lab):
    own = f"{BASE['laptop']}/runs/same/data"
    as_user(lab, "laptop", f"mkdir -p {own} && cd {own} && for n in 0 1 2 3; do echo other >shard_0000$n.parquet; done")
    lab.play("--tags", "data")
    assert_the_same_everywhere(lab)
    tokenizers = {lab.on(host, f"cat {BASE[host]}/runs/same/tokenizer/* | sha256sum") for host in HOSTS}
    assert len(tokenizers) == 1
    assert "changed: nothing" in lab.play("--tags", "data")


def test_three_hosts_train_together_on_tables_that_do_not_divide_by_three(lab):
    # The timeout of the scenario is one for transfers.
    said = lab.play("-e", "ddp_iterations=6", "-e", "ddp_timeout=60", "-e", "ddp_eval_every=-1")
    assert "weights identical on all 3 ranks" in said
    digests = set()
    for rank, host in enumerate(HOSTS):
        folder = f"{BASE[host]}/runs/same"
        events = [json.loads(line) for line in lab.on(host, f"cat {folder}/metrics-rank{rank}.jsonl").splitlines()]
        (start,) = [event for event in events if event["kind"] == "start"]
        assert start["world"] == 3
        model = start["model"]
        assert model["parameters"]["wte"] // model["config"]["n_embd"] % 3, "the table divides"
        assert [event["step"] for event in events if event["kind"] == "step"] == list(range(6))
        assert events[-1]["kind"] == "end" and events[-1]["identical"] is True
        digests |= {event["digest"] for event in events if event["kind"] == "digest" and event["step"] == 6}
    assert len(digests) == 1
    assert "changed: nothing" in lab.play("-e", "ddp_iterations=6", "-e", "ddp_timeout=60", "-e", "ddp_eval_every=-1")


def sent(lab, host):
    return int(lab.on(host, "cat /sys/class/net/eth0/statistics/tx_bytes"))


def test_a_transfer_that_was_cut_goes_on_where_it_ended(lab, background):
    size = 24_000_000
    # Another collection, with one shard that is too big to arrive at once.
    lab.on("desktop", f"mkdir /srv/big && cp /srv/collection/shard_0000[02].parquet /srv/big && {BIG_SHARD} {size}")
    for host in HOSTS:
        lab.on(host, "tc qdisc add dev eth0 root tbf rate 40mbit burst 64kb latency 50ms")
    words = ("--tags", "data", "-e", "ddp_run=cut", "-e", '{"ddp_data_paths": ["/srv/big"]}', "-e", "ddp_data_shards=3")
    play = background(*words)
    part = f"find {BASE['laptop']}/data -name '.shard_00001*.part' -size +2M"
    wait_for("a part of the big shard", lambda: lab.on("laptop", part).strip() or play.poll() is not None, 600)
    assert play.poll() is None
    for host in HOSTS:
        lab.on(
            host, f"kill -9 $(grep -o '\"pid\": [0-9]*' {BASE[host]}/data/*/.share/*/server.state | grep -o '[0-9]*$')"
        )
    assert play.wait(600) != 0
    assert "shard_00001.parquet" in play.said()
    had = int(lab.on("laptop", f"{part} -printf %s"))
    for host in HOSTS:
        lab.on(host, "tc qdisc del dev eth0 root")

    before = sum(sent(lab, host) for host in HOSTS)
    lab.play(*words)
    moved = sum(sent(lab, host) for host in HOSTS) - before
    # Both hosts had some of it; only the rest crossed the network.
    assert moved < 2 * size - had + 2_000_000
    wanted = sums(lab, "desktop", "/srv/big")
    assert {host: read_by(lab, host, "cut") for host in HOSTS} == dict.fromkeys(HOSTS, wanted)


def words_for(run, source, folder, shards=3, host=None):
    """The settings of a run with data of its own."""
    settings = {"ddp_run": run, "ddp_data_source": source, "ddp_data_paths": [str(folder)], "ddp_data_shards": shards}
    return ("--tags", "data", "-e", json.dumps({**settings, "ddp_data_host": host}))


def assert_read_everywhere(lab, run, wanted):
    assert {host: read_by(lab, host, run) for host in HOSTS} == dict.fromkeys(HOSTS, wanted)
    tokenizers = {lab.on(host, f"cat {BASE[host]}/runs/{run}/tokenizer/* | sha256sum") for host in HOSTS}
    assert len(tokenizers) == 1


def test_shards_of_a_host_that_is_not_the_master(lab):
    said = lab.play(*words_for("theirs", "host", "/srv/own", host="laptop"), code=2)
    assert "names /srv/own, which does not exist on laptop" in said
    lab.on("mirror", "cd /srv/http && tar -cf /srv/own.tar shard_0000[012].parquet")
    kept = lab.kept / "own.tar"
    subprocess.run(["podman", "cp", "ddp-shards-mirror:/srv/own.tar", kept], check=True)
    subprocess.run(["podman", "cp", kept, "ddp-shards-laptop:/srv/own.tar"], check=True)
    lab.on("laptop", "mkdir /srv/own && tar -C /srv/own -xf /srv/own.tar")
    lab.play(*words_for("theirs", "host", "/srv/own", host="laptop"))
    assert_read_everywhere(lab, "theirs", sums(lab, "laptop", "/srv/own"))
    assert "changed: nothing" in lab.play(*words_for("theirs", "host", "/srv/own", host="laptop"))


class Background:
    """A playbook that goes on while the test does something else."""

    def __init__(self, lab, arguments):
        self.output = (lab.kept / "background.log").open("w+")
        self.process = subprocess.Popen(
            ["ansible-playbook", "nanochat.ddp.train", "-i", str(lab.scenario / "inventory"), *arguments],
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.poll, self.wait = self.process.poll, self.process.wait

    def said(self):
        self.output.seek(0)
        return self.output.read()


@pytest.fixture
def background(lab):
    started = []

    def start(*arguments):
        started.append(Background(lab, arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
