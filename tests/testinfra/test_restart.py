"""A run that is started again, stopped and looked at from every state in which its hosts can be."""

from __future__ import annotations

import json

import pytest
from lab import wait_for

RUN = "nanochat-ddp/runs/again"
HOME = {"desktop": "/home/lzw", "laptop": "/home/xiaoxin"}
USER = {"desktop": "lzw", "laptop": "xiaoxin"}
RANK = {"desktop": 0, "laptop": 1}
HOSTS = list(HOME)
ALL_RUNNING = {"desktop": "running", "laptop": "running"}
FEW_STEPS = ("-e", "ddp_iterations=12")

# The tests tell one story and are played in this order.


def file_of(lab, host, name):
    return lab.on(host, f"cat {HOME[host]}/{RUN}/{name}")


def events(lab, host, kind):
    lines = file_of(lab, host, f"metrics-rank{RANK[host]}.jsonl").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def session(lab, host):
    return json.loads(file_of(lab, host, "session.json"))


def trainer_pid(lab, host):
    return json.loads(file_of(lab, host, f"heartbeat-rank{RANK[host]}.json"))["pid"]


def alive(lab, host, pid):
    return lab.on(host, f"kill -0 {pid} 2>/dev/null && echo alive || true").strip() == "alive"


def restart(lab, *more, code=0):
    return lab.play("--tags", "restart", "-e", "watch=false", *more, code=code)


def of_this_run(lab, host):
    """Name and command line of the processes that carry the mark of any session of ours, but for tmux and the pane's own."""
    script = (
        "for entry in /proc/[0-9]*; do tr '\\0' '\\n' <$entry/environ 2>/dev/null | grep -q ^NANOCHAT_DDP_SESSION= "
        "&& echo $(cat $entry/comm) $(tr '\\0' ' ' <$entry/cmdline); done; true"
    )
    return [line for line in lab.on(host, script).splitlines() if "base_train" in line]


def test_looking_and_stopping_where_nothing_was_set_up(lab):
    assert "no run" in lab.play("--tags", "status")
    assert lab.states() == {"desktop": "absent", "laptop": "absent"}
    assert "nothing was set up" in lab.play("--tags", "stop")
    assert "nothing was set up" in lab.play(playbook="stop")
    lab.play(playbook="reset")
    assert "No host" in lab.play(playbook="doctor", code=2)
    for host in HOSTS:
        lab.on(host, f"test ! -e {HOME[host]}/nanochat-ddp")


def test_restart_where_nothing_was_set_up_does_all_that_is_needed(lab):
    restart(lab)
    assert lab.states() == ALL_RUNNING
    for host in HOSTS:
        assert events(lab, host, "step"), "it returned before the first step"


def test_field_18_restart_of_a_running_run_goes_on_from_the_newest_checkpoint(lab):
    wait_for("a checkpoint on both hosts", lambda: all(events(lab, host, "checkpoint") for host in HOSTS))
    before = {host: session(lab, host) for host in HOSTS}
    restart(lab)
    assert lab.states() == ALL_RUNNING
    resumed = {host: events(lab, host, "start")[-1]["resumed_from"] for host in HOSTS}
    # It was asked to end, so it saved at its last step.
    saved = {host: [event["step"] for event in events(lab, host, "checkpoint")] for host in HOSTS}
    assert resumed["desktop"] == resumed["laptop"] > 0
    for host in HOSTS:
        assert resumed[host] in saved[host]
        assert session(lab, host)["id"] != before[host]["id"]
        assert not alive(lab, host, before[host]["child_pid"]), "the run before was left behind"


def test_field_18_restart_of_a_crashed_run_goes_on(lab):
    lab.on("laptop", f"kill -9 {trainer_pid(lab, 'laptop')}")
    wait_for("the end on both hosts", lambda: "running" not in lab.states().values())
    assert lab.states()["laptop"] == "crashed"
    said = lab.play("--tags", "status")
    assert "crashed" in said
    assert "was stopped" not in lab.play("--tags", "stop"), "there was nothing left to stop"
    restart(lab)
    assert lab.states() == ALL_RUNNING
    assert events(lab, "desktop", "start")[-1]["resumed_from"] > 0


def test_field_06_a_session_whose_record_is_lost_is_found_and_ended(lab):
    before = {host: session(lab, host) for host in HOSTS}
    lab.on("laptop", f"rm -r {HOME['laptop']}/{RUN}/session.json {HOME['laptop']}/{RUN}/.session")
    restart(lab)
    assert lab.states() == ALL_RUNNING
    for host in HOSTS:
        assert not alive(lab, host, before[host]["child_pid"])
        assert [line.split()[0] for line in of_this_run(lab, host)] == ["nanochat-rank"]


def test_field_23_stop_ends_both_and_is_verified(lab):
    pids = {host: trainer_pid(lab, host) for host in HOSTS}
    said = lab.play("--tags", "stop")
    assert said.count("was stopped") == 2
    assert "newest checkpoint: step" in said
    assert lab.states() == {"desktop": "stopped", "laptop": "stopped"}
    for host in HOSTS:
        assert not alive(lab, host, pids[host])
        assert of_this_run(lab, host) == []
    assert lab.play("--tags", "stop").count("does not run") == 2


@pytest.fixture
def stranger(lab):
    """Another user's program on the port of the job."""
    program = "import socket, time; s = socket.create_server(('0.0.0.0', 29500)); time.sleep(600)"
    lab.on("desktop", f'setsid python3 -c "{program}" >/dev/null 2>&1 </dev/null & echo $! >/tmp/stranger')
    pid = int(wait_for("its pid", lambda: lab.on("desktop", "cat /tmp/stranger").strip()))
    wait_for("the port", lambda: ":29500 " in lab.on("desktop", "ss -Hltn"))
    yield pid
    lab.on("desktop", f"kill {pid} 2>/dev/null || true")


def test_field_06_a_stranger_on_the_port_is_named_and_stays_alive(lab, stranger):
    said = restart(lab, code=2)
    assert str(stranger) in said
    assert "root" in said
    assert "python3 -c" in said
    assert "29500" in said
    assert alive(lab, "desktop", stranger)
    assert lab.states() == {"desktop": "stopped", "laptop": "stopped"}, "nothing is started beside it"


def test_restart_with_half_of_it_gone(lab):
    lab.on("desktop", f"rm -r {HOME['desktop']}/nanochat-ddp/trainer/nanochat")
    lab.on("laptop", f"rm -r {HOME['laptop']}/nanochat-ddp/data")
    restart(lab, *FEW_STEPS, "-e", "ddp_fresh=true")
    wait_for("the end", lambda: lab.states() == {"desktop": "finished", "laptop": "finished"})


def test_what_has_finished_stays_as_it_is_until_it_is_asked_for_anew(lab):
    before = {host: file_of(lab, host, f"metrics-rank{RANK[host]}.jsonl") for host in HOSTS}
    # The first time its results are still to be collected.
    lab.play(*FEW_STEPS)
    assert "changed: nothing" in lab.play(*FEW_STEPS)
    assert {host: file_of(lab, host, f"metrics-rank{RANK[host]}.jsonl") for host in HOSTS} == before
    lab.play(*FEW_STEPS, "-e", "ddp_fresh=true")
    for host in HOSTS:
        newest = lab.on(host, f"ls {HOME[host]}/nanochat-ddp/runs/again/previous | sort -n | tail -n 1").strip()
        assert file_of(lab, host, f"previous/{newest}/metrics-rank{RANK[host]}.jsonl") == before[host]
        assert events(lab, host, "start")[-1]["resumed_from"] is None
        assert events(lab, host, "digest")[-1]["identical"] is True


def test_field_23_reset_leaves_data_and_checkpoints(lab):
    lab.play(playbook="reset")
    for host in HOSTS:
        base = f"{HOME[host]}/nanochat-ddp"
        assert "model_" in lab.on(host, f"ls {base}/runs/again/base_checkpoints/again")
        assert "shard_00000.parquet" in lab.on(host, f"ls {base}/data/*/")
        assert lab.on(host, "tmux list-sessions 2>/dev/null || true", user=USER[host]) == ""
        lab.on(host, f"test ! -e {base}/runs/again/session.json")
    lab.play("-e", "ddp_purge=all", playbook="reset")
    for host in HOSTS:
        assert lab.on(host, f"find {HOME[host]}/nanochat-ddp -type f | head") == ""
        lab.on(host, "test -x /opt/trainer-venv/bin/python")
