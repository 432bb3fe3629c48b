# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each entry of the list of field failures, made for real on two hosts, with the code or verdict that names it and the time it took."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest
from hosts import ADDRESS, BASE, HERE, RUN, USER, Training, limit_cores, on, podman, set_flag, until

HOLD = 'import socket,time;s=socket.create_server(("0.0.0.0",29500));print(1,flush=True);time.sleep(600)'


@pytest.fixture(scope="module")
def before(lab):
    """Faults that do not hide each other, all made at once, and what preflight says of them."""
    rule = "ip saddr 10.89.75.12 tcp dport 32768-60999 ct state new drop"
    wall = f"table inet owner {{ chain i {{ type filter hook input priority 0; {rule}; }}; }}"
    on("desktop", f"nft '{wall}'")
    on("laptop", "ufw allow 22/tcp && ufw --force enable")
    on(
        "laptop",
        "cp /etc/hosts /root/hosts && sed '/10.89.75.12/d' /root/hosts >/etc/hosts && echo 127.0.1.1 laptop >>/etc/hosts",
    )
    on("desktop", f"setsid /usr/bin/python3 -c '{HOLD}' torchrun base_train >/tmp/held 2>&1 & echo $! >/tmp/holder")
    until("somebody holds the port", lambda: on("desktop", "cat /tmp/held"))
    holder = on("desktop", "cat /tmp/holder").strip()
    try:
        findings, played = lab.preflight()
    finally:
        on("desktop", f"kill {holder}; nft delete table inet owner", check=False)
        on("laptop", "ufw --force reset; nft flush ruleset; cat /root/hosts >/etc/hosts", check=False)
    assert played.code != 0
    return {"findings": findings, "seconds": played.seconds, "holder": holder}


def test_field_01_the_firewall_that_drops_data_ports_is_named_with_the_rule_that_opens_it(before, found):
    one = before["findings"]["port-blocked desktop"]
    assert (one["peer"], one["severity"]) == ("laptop", "error")
    assert "nftables is active on desktop" in one["seen"] and "32768-60999 accept" in one["remedy"]
    found("nftables drops what the worker sends to the master's data ports", one["code"], before["seconds"])


def test_field_02_without_sudo_the_owner_gets_the_commands(before, found):
    one = before["findings"]["no-sudo laptop"]
    assert one["peer"] == "desktop"
    assert f"sudo ufw prepend allow from {ADDRESS['desktop']}" in one["remedy"]
    found("ufw is on, and the worker's user has no sudo", one["code"], before["seconds"])


def test_field_04_a_name_that_leads_to_itself_is_told_and_the_plan_has_addresses(before, found, short_plan):
    one = before["findings"]["name-is-loopback laptop"]
    assert "127.0.1.1" in one["seen"]
    assert {node["host"]: node["address"] for node in short_plan["nodes"]} == ADDRESS
    assert short_plan["master"]["address"] == ADDRESS["desktop"]
    found("/etc/hosts of the worker says 127.0.1.1 for its name", one["code"], before["seconds"])


def test_field_06_the_orphan_on_the_port_is_named(before, found):
    one = before["findings"]["port-held desktop"]
    assert "port 29500" in one["seen"]
    told = before["findings"]["other-training desktop"]
    assert f"process {before['holder']} of root" in one["seen"] + told["seen"]
    found("a process without parent holds port 29500", one["code"], before["seconds"])


def test_field_03_bridges_are_not_taken_and_refused_when_asked_for(lab, found):
    on("desktop", "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up")
    try:
        document, played = lab.plan(ddp_nic="")
        assert {node["host"]: node["nic"] for node in document["plan"]["nodes"]} == {
            "desktop": "enp4s0",
            "laptop": "wlp3s0",
        }
        document, played = lab.plan("--limit", "desktop,laptop", ddp_nic="docker0")
        assert played.code != 0 and "docker0" in played.output
    finally:
        on("desktop", "ip link del docker0")
    found("a Docker bridge is up, cards have other names on each host", "refused by the plan", played.seconds, "plan")


@pytest.fixture(scope="module")
def detour(lab):
    """The way between the hosts goes through an overlay, and is slow as a bad radio link; what preflight and its prediction say."""
    for host, peer in (("desktop", "laptop"), ("laptop", "desktop")):
        mine = {"desktop": 1, "laptop": 2}
        nic = {"desktop": "enp4s0", "laptop": "wlp3s0"}[host]
        on(host, f"ip link add tailscale0 type vxlan id 7 remote {ADDRESS[peer]} local {ADDRESS[host]} dstport 4789 dev {nic} && "
           f"ip addr add 100.64.0.{mine[host]}/24 dev tailscale0 && ip link set tailscale0 up && "
           f"tc qdisc add dev {nic} root tbf rate 20mbit burst 64kb latency 50ms")  # fmt: skip
    # The peers' network goes through the overlay: only what the tunnel itself carries stays on the card.
    on("desktop", f"ip route add {ADDRESS['laptop']}/32 dev tailscale0 src {ADDRESS['desktop']} table 7 && "
       f"ip rule add to {ADDRESS['laptop']} lookup 7 pref 200 && "
       f"ip rule add to {ADDRESS['laptop']} ipproto udp dport 4789 lookup main pref 100")  # fmt: skip
    on("laptop", f"ip route add {ADDRESS['desktop']}/32 dev tailscale0 src {ADDRESS['laptop']} table 7 && "
       f"ip rule add to {ADDRESS['desktop']} lookup 7 pref 200 && "
       f"ip rule add to {ADDRESS['desktop']} ipproto udp dport 4789 lookup main pref 100")  # fmt: skip
    try:
        findings, played = lab.preflight(preflight_measure_seconds=3)
    finally:
        for host in USER:
            on(host, "ip rule del pref 100; ip rule del pref 200; ip link del tailscale0", check=False)
            on(host, "tc qdisc del dev $(ls /sys/class/net | grep -v lo) root", check=False)
    return {"findings": findings, "seconds": played.seconds}


def test_field_05_an_overlay_on_the_route_is_found(detour, found):
    one = detour["findings"]["route-over-overlay"]
    assert "tailscale0" in one["seen"]
    found("packets to the peer leave by tailscale0", one["code"], detour["seconds"])


def test_field_16_two_hosts_that_are_slower_than_one_are_told(detour, found):
    one = detour["findings"]["not-worth-it"]
    found("the link is so slow that two hosts are slower than one", one["code"], detour["seconds"])


def test_field_25_a_link_as_slow_as_a_radio_is_told(detour, found):
    one = detour["findings"]["link-slow"]
    assert re.search(r"from \w+ to \w+: \d+ Mbit/s", one["seen"])
    found("the link carries 20 Mbit/s", one["code"], detour["seconds"])


@pytest.fixture(scope="module")
def other_files(lab):
    """Preflight's finding when the worker's files differ from the master's."""
    code, data = f"{BASE['laptop']}/trainer/nanochat/kit/common.py", f"{BASE['laptop']}/data"
    shard = on("laptop", f"ls {data}/*/shard_00001.parquet").strip()
    on("laptop", f"cp -p {code} /root/code && echo '# repaired by hand' >>{code} && mv {shard} /root/shard")
    try:
        findings, played = lab.preflight()
    finally:
        on("laptop", f"cp -p /root/code {code} && cp -p /root/shard {shard}", check=False)
    assert played.code != 0
    return {"findings": findings, "seconds": played.seconds}


def test_field_09_a_trainer_that_somebody_changed_is_named(other_files, found):
    one = other_files["findings"]["trainer-differs laptop"]
    assert one["severity"] == "error" and one["peer"] == "desktop"
    found("a file of the worker's trainer was changed by hand", one["code"], other_files["seconds"])


def test_field_07_a_shard_that_is_gone_is_named_before_the_start(other_files, found):
    one = other_files["findings"]["data-differs laptop"]
    assert "shard_00001.parquet missing" in one["seen"]
    found("a shard is gone from the worker's store", one["code"], other_files["seconds"])


# On a busy machine PyTorch may load slowly; that time is no part of any verdict.
STARTING = 240.0


def broken_run(training):
    """The doctor's verdict on a run that cannot work from its start; the seconds count from when its ranks were started."""
    until("it is started on both hosts", lambda: all(map(training.started, USER)), STARTING)
    training.fault()
    verdict, took = training.verdict()
    return verdict, took


def test_field_07_shards_that_differ_are_named(plan, train, found):
    away = f"{BASE['laptop']}/runs/{RUN}/data/shard_00001.parquet"
    on("laptop", f"mv {away} /home/xiaoxin/aside")
    try:
        verdict, took = broken_run(train(plan))
    finally:
        on("laptop", f"mv /home/xiaoxin/aside {away}")
    assert verdict["code"] == "data-mismatch" and "shard_00001.parquet" in verdict["seen"]
    found("the worker has one shard less", verdict["code"], took, "watch")


def test_field_08_a_data_folder_set_on_one_host_only_is_named(plan, train, found):
    env = [node["env"] for node in plan["nodes"]]
    assert sorted(env[0]) == sorted(env[1])
    on(
        "desktop",
        f"mkdir -p /home/lzw/other && cp $(ls {BASE['desktop']}/runs/{RUN}/data/*.parquet | head -2) /home/lzw/other/",
        user="lzw",
    )
    plan["nodes"][0]["env"]["NANOCHAT_DATA_DIR"] = "/home/lzw/other"
    verdict, took = broken_run(train(plan))
    assert verdict["code"] == "data-mismatch"
    found("NANOCHAT_DATA_DIR is another one on the master", verdict["code"], took, "watch")


def test_field_09_a_setting_that_differs_is_named(plan, train, found):
    plan["nodes"][1]["argv"].append("--matrix-lr=0.5")
    verdict, took = broken_run(train(plan))
    assert verdict["code"] == "settings-differ" and "matrix_lr" in verdict["seen"] and "0.5" in verdict["seen"]
    found("--matrix-lr was given to the worker only", verdict["code"], took, "watch")


def test_field_14_the_exit_code_of_a_rank_is_told(plan, train, found):
    plan["nodes"][1]["argv"] = ["/bin/sh", "-c", "sleep 10; echo it broke >&2; exit 3"]
    training = train(plan)
    verdict, took = broken_run(training)
    assert (verdict["code"], verdict["host"]) == ("rank-failed", "laptop")
    assert "code 3" in verdict["seen"]
    assert json.loads(training.read("laptop", "session.json"))["exit_code"] == 3
    found("the worker's command ends with code 3", verdict["code"], took, "watch")


def test_field_20_a_rank_that_never_comes_to_the_rendezvous_is_told(plan, train, found):
    plan["nodes"][1]["argv"] = ["/bin/sh", "-c", "echo waiting for a disk; exec sleep 600"]
    training = train(plan)
    verdict, took = broken_run(training)
    assert verdict["code"] == "rank-stuck" and f"{ADDRESS['desktop']}:29500" in verdict["seen"]
    found("the worker never comes to the rendezvous", verdict["code"], took, "watch")


NASTY = "two words, 'single' \"double\" $HOME `id` ; & | \\ ! *"


@pytest.fixture(scope="module")
def alive(lab, endless):
    """A run in good health, from which the controller has gone after its first steps."""
    endless["nodes"][1]["env"]["NANOCHAT_TEST_WORDS"] = NASTY
    training = Training(lab, endless)
    try:
        training.reach(20)
        training.leave()
        yield training
    finally:
        training.close()


@pytest.fixture
def watched(lab, alive):
    """The same, watched again."""
    watching = Training(lab, alive.plan, start=())
    until("it is watched", lambda: "tok/s" in watching.log.read_text(), 60)
    yield watching
    watching.leave()


def goes_on(training, host="laptop"):
    """Steps are made from here on."""
    step = training.heartbeat(host)["step"]
    until("further steps", lambda: training.heartbeat(host)["step"] > step + 5, 90)


def test_field_11_words_with_quotes_arrive_whole(alive, found):
    pid = alive.heartbeat("laptop")["pid"]
    environ = on("laptop", f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()
    assert f"NANOCHAT_TEST_WORDS={NASTY}" in environ
    found("a setting with quotes, blanks and $ on its way through ssh and tmux", "arrives whole", 0.0, "launch")


def test_field_12_training_goes_on_without_the_connection(watched, found):
    begun = time.monotonic()
    for host in USER:
        on(host, "pkill -KILL -f '^sshd: [lx]'", check=False)
    goes_on(watched)
    assert watched.process.poll() is None, watched.log.read_text()
    found("the controller's connections die", "goes on, and is watched on", time.monotonic() - begun, "watch")


def test_field_13_the_log_is_there_line_by_line(alive, found):
    begun = time.monotonic()
    step = alive.heartbeat("desktop")["step"]
    until("its line in the log", lambda: f"step {step + 3:05d}/" in alive.read("desktop", "log/rank0.log"), 30)
    pane = on("desktop", f"tmux capture-pane -p -t nanochat-{RUN}-rank0", user="lzw")
    assert "step 0" in pane
    found("a log that is buffered", "log and pane hold the step just made", time.monotonic() - begun, "status")


def examined(lab):
    """The doctor called by hand: the verdict and what the playbook said."""
    played = lab.play("nanochat.ddp.doctor", ddp_json=True, ddp_run=RUN)
    return json.loads((lab.folder / RUN / "doctor.json").read_text())["verdict"], played


def test_field_17_another_load_on_a_host_is_named(lab, alive, found):
    on("laptop", "for i in 1 2 3; do setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!; done >/tmp/hogs")
    try:
        one, played = examined(lab)
    finally:
        on("laptop", "for pid in $(cat /tmp/hogs); do kill -KILL $pid; done")
    assert played.code == 0, played.output
    assert one["code"] in ("healthy-slow", "rank-slow")
    # What it runs may hold what its owner shows nobody, so it is named by its program.
    named = re.search(r"rank 1 \(laptop\): pid (\d+) of root \(sh\) takes", one["seen"])
    assert named and named[1] in on("laptop", "cat /tmp/hogs").split(), one["seen"]
    found("another load takes the worker's cores", one["code"], played.seconds, "doctor")


def test_field_17_a_limit_that_holds_a_rank_back_is_named(lab, alive, found):
    limit_cores("laptop", 0.1)
    try:
        one, played = examined(lab)
    finally:
        limit_cores("laptop", 0)
    assert played.code == 0, played.output
    assert one["code"] in ("healthy-slow", "rank-slow")
    # On a busy machine it may get so little CPU time that it never reaches the limit.
    reason = r"its cgroup's CPU limit throttles it|it waits for a core"
    assert re.search(rf"rank 1 \(laptop\).*({reason}) .*%", one["seen"]), one
    goes_on(alive)
    found("a limit of its control group leaves the worker a tenth of a core", one["code"], played.seconds, "doctor")


def test_field_22_of_a_healthy_run_the_doctor_says_so_in_one_sentence(lab, alive, found):
    one, played = examined(lab)
    assert played.code == 0, played.output
    assert one["seen"].startswith("All ranks make progress (at step ")
    # On a busy machine a rank may wait for a core; the doctor then says that, and nothing else.
    assert one["code"] == "healthy" or (one["code"] == "healthy-slow" and "waits for a core" in one["seen"]), one
    assert one["seen"].count(". ") == 0 and one["seen"].endswith(".")
    found("nothing: the doctor is called on a healthy run", one["code"], played.seconds, "doctor")


def test_field_19_by_hand_the_doctor_names_a_stopped_rank_at_once(lab, alive, found):
    pid = alive.heartbeat("laptop")["pid"]
    on("laptop", f"kill -STOP {pid}")
    try:
        one, played = examined(lab)
    finally:
        on("laptop", f"kill -CONT {pid}")
    assert played.code == 2, played.output
    assert (one["code"], one["host"]) == ("rank-frozen", "laptop") and f"kill -CONT {pid}" in one["remedy"]
    goes_on(alive)
    found(
        "the worker's process is stopped, and the doctor is called by hand at once",
        one["code"],
        played.seconds,
        "doctor",
    )


def test_field_22_one_command_tells_how_it_is(lab, alive, found):
    played = lab.play("nanochat.ddp.status")
    assert played.code == 0
    assert re.search(r"desktop.*running", played.output) and re.search(r"laptop.*running", played.output)
    found("nobody sees how the run is", "one screen", played.seconds, "status")


def judged(watching, make, mend):
    """Make a fault in a run that makes steps, and mend it; the verdict and its seconds."""
    watching.fault()
    try:
        make()
        return watching.verdict()
    finally:
        mend()


def test_field_19_a_stopped_rank_is_named(watched, found):
    pid = watched.heartbeat("laptop")["pid"]
    verdict, took = judged(
        watched, lambda: on("laptop", f"kill -STOP {pid}"), lambda: on("laptop", f"kill -CONT {pid}")
    )
    assert (verdict["code"], verdict["host"]) == ("rank-frozen", "laptop")
    assert str(pid) in verdict["seen"]
    goes_on(watched)
    found("the worker's process is stopped (SIGSTOP)", verdict["code"], took, "watch")


def test_field_19_a_frozen_host_is_named(watched, found):
    container = "ddp-faults-laptop"
    verdict, took = judged(watched, lambda: podman("pause", container), lambda: podman("unpause", container))
    assert (verdict["code"], verdict["host"]) == ("rank-host-no-answer", "laptop")
    goes_on(watched)
    found("the worker freezes as a whole", verdict["code"], took, "watch")


def test_field_19_a_link_that_goes_dark_is_named(watched, found):
    wall = (
        f"table inet owner {{ chain i {{ type filter hook input priority 0; ip saddr {ADDRESS['desktop']} drop; }}; }}"
    )
    verdict, took = judged(
        watched, lambda: on("laptop", f"nft '{wall}'"), lambda: on("laptop", "nft delete table inet owner")
    )
    assert verdict["code"] == "link-cut" and {verdict["host"], verdict["peer"]} == {"desktop", "laptop"}
    found("a firewall drops what the master sends, in mid-run", verdict["code"], took, "watch")


def test_field_23_stop_ends_all_of_it_on_both_hosts(lab, alive, found):
    goes_on(alive)
    marks = {host: json.loads(alive.read(host, "session.json"))["id"] for host in USER}
    played = lab.play("nanochat.ddp.stop")
    assert played.code == 0, played.output
    for host, mark in marks.items():
        assert json.loads(alive.read(host, "session.json"))["ended"]
        left = on(host, f"grep -lsz NANOCHAT_DDP_SESSION={mark} /proc/[0-9]*/environ; true")
        session = json.loads(alive.read(host, "session.json"))
        assert [pid for pid in re.findall(r"\d+", left) if int(pid) != session["pid"]] == []
    found("stopping on one host leaves the other", "both ended, and seen to be", played.seconds, "stop")


def test_field_18_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(plan, train, found):
    set_flag(plan, "save-every", 20)
    training = train(plan)
    pid = training.reach(45)
    verdict, took = judged(training, lambda: on("laptop", f"kill -KILL {pid}"), lambda: None)
    assert (verdict["code"], verdict["host"]) == ("rank-killed", "laptop")
    assert training.process.wait(60) != 0
    again = train(plan, fresh=False)
    until("it goes on", lambda: "Resuming from step" in again.read("desktop", "log/rank0.log"), 60)
    found("the worker's process is killed (SIGKILL) in mid-run", verdict["code"], took, "watch")


def test_field_18_a_full_disk_is_named(plan, train, found):
    set_flag(plan, "num-iterations", 10)
    folder = f"{BASE['laptop']}/runs/{RUN}"
    on("laptop", "fallocate -l 63M /mnt/small/full && mkdir -p /mnt/small/c && chmod 777 /mnt/small/c")
    on("laptop", f"rm -rf {folder}/base_checkpoints; ln -s /mnt/small/c {folder}/base_checkpoints", user="xiaoxin")
    on("desktop", f"rm -rf {BASE['desktop']}/runs/{RUN}/base_checkpoints")
    try:
        verdict, took = broken_run(train(plan, fresh=False))
    finally:
        on("laptop", f"rm -rf {folder}/base_checkpoints /mnt/small/*")
    assert (verdict["code"], verdict["host"]) == ("disk-full", "laptop")
    found("the worker's disk is full when the checkpoint is saved", verdict["code"], took, "watch")


def test_field_19_a_rank_that_is_stopped_in_an_evaluation_is_named(plan, train, found):
    set_flag(plan, "eval-every", 5)
    set_flag(plan, "eval-tokens", 2000000)
    training = train(plan)
    pid = training.reach(0)
    until("it evaluates", lambda: training.heartbeat("laptop").get("phase") == "eval", 60)
    verdict, took = judged(
        training, lambda: on("laptop", f"kill -STOP {pid}"), lambda: on("laptop", f"kill -KILL {pid}")
    )
    assert (verdict["code"], verdict["host"]) == ("rank-frozen", "laptop")
    found("the worker's process is stopped in the middle of an evaluation", verdict["code"], took, "watch")


FLIP = """
import gc, os, sys, threading, time
def flip():
    while True:
        time.sleep(0.05)
        model = sys.modules.get("nanochat.model.gpt")
        for one in gc.get_objects() if model and hasattr(model, "GPT") else ():
            if type(one) is model.GPT and one.lm_head.weight.device.type == "cpu":
                time.sleep(3)
                for weight in one.parameters():
                    weight.data.view(-1)[0] += 0.01
                return
# A rank is forked from a process that has loaded the trainer, without its threads.
os.register_at_fork(after_in_child=lambda: threading.Thread(target=flip, daemon=True).start())
"""


def test_field_21_weights_that_drift_apart_are_named(plan, train, found):
    set_flag(plan, "save-every", 100)
    on(
        "laptop",
        f"mkdir -p /home/xiaoxin/flip && cat >/home/xiaoxin/flip/sitecustomize.py <<'END'\n{FLIP}\nEND",
        user="xiaoxin",
    )
    plan["nodes"][1]["env"]["PYTHONPATH"] += ":/home/xiaoxin/flip"
    verdict, took = broken_run(train(plan))
    assert verdict["code"] == "weights-differ" and "first tensor that differs" in verdict["seen"]
    found("a number of the worker's weights changes by itself", verdict["code"], took, "watch")


def test_field_19_a_rank_killed_for_want_of_memory_is_named(plan, train, found):
    def limit(size):
        podman("update", "--memory", size, "--memory-swap", size, "ddp-faults-laptop")

    training = train(plan)
    pid = training.reach(15)

    def fill():
        # The rank is the one that the kernel is to take, and something else wants the memory.
        on("laptop", f"echo 1000 >/proc/{pid}/oom_score_adj")
        used = on("laptop", "cat /sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat 2>/dev/null; true")
        held = re.search(r"^(?:total_rss|anon) (\d+)", used, re.M)
        limit(str(int(held[1]) + (60 << 20)))
        on("laptop", "python3 -c 'x = bytearray(200 << 20)'", check=False)

    verdict, took = judged(training, fill, lambda: limit("16g"))
    assert (verdict["code"], verdict["host"]) == ("rank-oom", "laptop")
    found("the kernel kills the worker's process: out of memory (OOM)", verdict["code"], took, "watch")


def test_field_15_a_model_that_is_too_large_is_told_in_numbers(lab, found):
    _document, played = lab.plan(ddp_depth=64, ddp_aspect_ratio=128, ddp_head_dim=128)
    assert played.code != 0
    assert re.search(r"needs [\d.]+ G\w+ of memory|of memory, but", played.output), played.output
    found("a model that is larger than it was taken for", "memory-short", played.seconds, "plan")


def test_field_18_a_disk_that_is_too_small_is_told_before_the_start(lab, found):
    findings, played = lab.preflight(ddp_base_dir="/mnt/small/nanochat", preflight_with_trainer=False)
    assert played.code != 0
    one = findings["disk-short laptop"]
    assert re.search(r"[\d.]+ [GM]B free below /mnt/small", one["seen"]), one
    found("the disk of the base folder has 64 MB", one["code"], played.seconds)


def test_field_12_a_host_without_tmux_is_told(lab, found):
    on("laptop", "mv /usr/bin/tmux /usr/bin/tmux.away")
    try:
        findings, played = lab.preflight(preflight_with_trainer=False)
    finally:
        on("laptop", "mv /usr/bin/tmux.away /usr/bin/tmux")
    assert played.code != 0
    one = findings["no-tmux laptop"]
    found("a run would end with the connection: the worker has no tmux", one["code"], played.seconds)


def test_field_24_a_folder_that_the_user_may_not_write_is_told(lab, short_plan, found):
    assert {node["host"]: (node["user"], node["base_dir"]) for node in short_plan["nodes"]} == {
        host: (USER[host], BASE[host]) for host in USER
    }
    _document, played = lab.plan(ddp_base_dir="/root/nanochat")
    assert played.code != 0 and "/root" in played.output
    found("one path for two users, which only one of them may write", "folder-refused", played.seconds, "plan")


def test_a_run_without_faults_gives_no_finding(lab):
    done = subprocess.run(
        [str(HERE / "no_false_alarm.sh"), "1"], env=lab.env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
