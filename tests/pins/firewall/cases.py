# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside a container: plays one case with the module peer_firewall and prints what it saw as JSON.

A case is an owner's rule set (shell commands) and steps, each a call of the module. With each step it prints how the
rules, as the kernel and the files hold them, then differ from the owner's.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from typing import Any

BASE = {"name": "d4", "peers": ["10.9.0.2", "fd09::2"], "ports": ["29500", "29501", "32768-60999"]}
FACTS = (
    "changed",
    "backend",
    "rules",
    "commands",
    "foreign",
    "persistent",
    "needs_root",
    "if_closed",
    "message",
    "msg",
)
ROUND = [{**BASE, "_ansible_check_mode": True}, BASE, BASE, {"name": "d4", "state": "absent"}]
OWNER = [{**BASE, "user": 65534}, {**BASE, "user": 65534, "state": "absent"}]
# Without the chains that a front end makes the same everywhere.
OF_FRONT_ENDS = re.compile(r"ufw6?-(before|after|logging|skip|reject|track|not-local)|\bLOG\b")
RULES = (
    "for t in iptables ip6tables; do $t-save 2>/dev/null | grep -v '^#' | sed 's/\\[[0-9:]*\\]//'; done; nft -s list ruleset; "
    'ufw show added 2>/dev/null; for f in /etc/nftables.conf /etc/iptables/rules.v4; do [ -f $f ] && echo "== $f" && cat $f; done; '
    "if firewall-cmd -q --state 2>/dev/null; then firewall-cmd --list-all; firewall-cmd --permanent --list-all; fi; true"
)

NFT_DROP = """nft -f - <<'END'
table inet filter {
  chain early { type filter hook input priority -10; policy accept; ct state invalid drop; }
  chain input { type filter hook input priority 0; policy drop; ct state established,related accept; tcp dport 22 accept; }
}
table ip late {
  chain input { type filter hook input priority 10; policy drop; ct state established accept; }
}
END"""
NFT_SAVED = """printf '%s\\n' '#!/usr/sbin/nft -f' 'flush ruleset' \
  'table inet filter {' 'chain input {' 'type filter hook input priority filter; policy drop;' \
  'ct state established,related accept' 'tcp dport 22 accept' '}' '}' >/etc/nftables.conf
systemctl enable -q nftables; nft -f /etc/nftables.conf"""
FAIL2BAN = """nft -f - <<'END'
table inet f2b-table {
  chain f2b-chain { type filter hook input priority -1; policy accept; tcp dport 22 ip saddr 203.0.113.7 reject; }
}
END"""
IPTABLES = """iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
iptables -P INPUT DROP
ip6tables -A INPUT -p tcp --dport 29000:60000 -j REJECT"""
IPTABLES_SAVED = (
    IPTABLES
    + """
mkdir -p /etc/iptables
printf '[Install]\\nWantedBy=multi-user.target\\n[Service]\\nExecStart=/bin/true\\n' \
  >/etc/systemd/system/netfilter-persistent.service
systemctl enable -q netfilter-persistent; iptables-save | grep -v '^#' | sed 's/\\[[0-9:]*\\]/[0:0]/' >/etc/iptables/rules.v4"""
)
IPTABLES_FOREIGN = """iptables -N f2b-sshd
iptables -A f2b-sshd -s 203.0.113.7 -j REJECT
iptables -A INPUT -p tcp --dport 22 -j f2b-sshd
iptables -N DOCKER-USER
iptables -A DOCKER-USER -j RETURN
iptables -N mine
iptables -A INPUT -j mine
iptables -A mine -p tcp -j DROP"""
UFW = "ufw allow 22/tcp && ufw --force enable"
FIREWALLD = """mkdir -p /run/dbus; dbus-daemon --system --fork
setsid firewalld --nofork --nopid >/var/log/firewalld.log 2>&1 </dev/null &
for attempt in $(seq 200); do firewall-cmd -q --state 2>/dev/null && break; sleep 0.1; done"""

CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "nothing": ("true", [*ROUND, *OWNER]),
    "ufw": (UFW, [*ROUND, *OWNER]),
    "ufw denial": (
        "ufw default allow incoming && ufw deny from 10.9.0.2 to any port 40000:41000 proto tcp && ufw --force enable", ROUND,
    ),
    "ufw owner's own rule": (
        UFW + " && ufw allow from 10.9.0.2 to any port 32768:60999 proto tcp comment mine", ROUND,
    ),
    "ufw two jobs": (UFW, [BASE, {**BASE, "name": "d8"}, {"name": "d4", "state": "absent"}, {"state": "absent"}]),
    "firewalld": (FIREWALLD, [*ROUND, *OWNER]),
    "firewalld source zone": (
        FIREWALLD + "\nfor permanent in '' --permanent; do firewall-cmd -q $permanent --zone=drop --add-source=10.9.0.0/24; done", ROUND,
    ),
    "nftables": (NFT_DROP, [*ROUND, *OWNER]),
    "nftables saved": (NFT_SAVED, [*ROUND, *OWNER]),
    "nftables beside fail2ban": (NFT_DROP + "\n" + FAIL2BAN, ROUND),
    "fail2ban alone": (FAIL2BAN, ROUND),
    "nftables other peer and ports": (
        NFT_DROP, [BASE, {**BASE, "peers": ["10.9.0.3"], "ports": ["29500"]}, {"state": "absent"}],
    ),
    "iptables": (IPTABLES, [*ROUND, *OWNER]),
    "iptables saved": (IPTABLES_SAVED, ROUND),
    "iptables beside others": (IPTABLES_FOREIGN, ROUND),
}  # fmt: skip


def shell(script: str) -> str:
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
    return done.stdout


def rules() -> list[str]:
    return [line for line in shell(RULES).splitlines() if not OF_FRONT_ENDS.search(line)]


def called(step: dict[str, Any]) -> dict[str, Any]:
    """The module's result, as the user of this step."""
    options = {key: value for key, value in step.items() if key != "user"}
    options["_ansible_remote_tmp"] = "/tmp"
    argv = [sys.executable, "-B", "-m", "ansible_collections.nanochat.ddp.plugins.modules.peer_firewall"]
    done = subprocess.run(
        argv, input=json.dumps({"ANSIBLE_MODULE_ARGS": options}), capture_output=True, text=True, check=False, user=step.get("user"),
    )  # fmt: skip
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    return {name: result[name] for name in FACTS if result.get(name) not in (None, [], "")}


def main(name: str) -> None:
    setup, steps = CASES[name]
    shell(f"rm -f /etc/nftables.conf\n{setup}")
    before = rules()
    told: list[dict[str, Any]] = [{"rules": before}]
    for step in steps:
        result = called(step)
        changed = [line for line in difflib.ndiff(before, rules()) if line[0] in "+-"]
        if FIREWALLD in setup:  # which lists rich rules in any order
            changed.sort()
            result.get("commands", []).sort()
        told.append({"step": json.dumps(step), "result": result, "rules": changed or "as before"})
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
