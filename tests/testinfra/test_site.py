"""Facts about two different hosts after they trained together."""

from __future__ import annotations

import json

import pytest

BASE = {"desktop": "/mnt/data/nanochat", "laptop": "/home/xiaoxin/projects/nanochat"}
USER = {"desktop": "lzw", "laptop": "xiaoxin"}
RANK = {"desktop": 0, "laptop": 1}


@pytest.fixture
def name(host):
    return host.check_output("hostname")


@pytest.fixture
def run_dir(name):
    return f"{BASE[name]}/runs/d3"


def events(host, run_dir, rank, kind):
    lines = host.file(f"{run_dir}/metrics-rank{rank}.jsonl").content_string.splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_every_step_was_made_and_the_weights_are_identical(host, name, run_dir):
    steps = events(host, run_dir, RANK[name], "step")
    assert [event["step"] for event in steps] == list(range(20))
    (end,) = events(host, run_dir, RANK[name], "end")
    assert end["reason"] == "finished"
    assert events(host, run_dir, RANK[name], "digest")[-1]["identical"] is True


def test_field_07_the_run_reads_exactly_the_shards_of_the_manifest(host, name, run_dir):
    (manifest,) = host.check_output(f"ls {BASE[name]}/data/*/manifest.json").split()
    wanted = json.loads(host.file(manifest).content_string)["shards"]
    assert sorted(host.file(f"{run_dir}/data").listdir()) == sorted(shard["name"] for shard in wanted)
    for shard in wanted:
        assert host.file(f"{run_dir}/data/{shard['name']}").sha256sum == shard["sha256"]


def test_field_12_the_session_can_be_read_after_the_end(host, name):
    pane = host.run(f"tmux capture-pane -p -S -200 -t nanochat-d3-rank{RANK[name]}")
    assert pane.rc == 0
    # The pane shows what the log has; only rank 0 tells of every step.
    log = host.file(f"{BASE[name]}/runs/d3/log/rank{RANK[name]}.log").content_string
    assert all(line.strip() in log for line in pane.stdout.splitlines()[:3])
    if RANK[name] == 0:
        assert "step 00019/00020" in log


def test_field_24_everything_belongs_to_the_job_s_user(host, name, run_dir):
    assert host.file(f"{run_dir}/env").mode == 0o600
    assert host.check_output(f"find {BASE[name]} ! -user {USER[name]} | head -3") == ""


def test_nothing_of_the_run_is_left(host, run_dir):
    session = json.loads(host.file(f"{run_dir}/session.json").content_string)
    assert session["exit_code"] == 0
    marked = f"grep -lz NANOCHAT_DDP_SESSION={session['id']} /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3"
    left = [pid for pid in host.run(marked).stdout.split() if pid != str(session["pid"])]
    assert left == []
