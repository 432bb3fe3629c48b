# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of a job: one pure function from (settings, probes) to the one document that every later step reads.

What the document holds is settled by the settings and by lasting facts of the hosts; free memory, clocks and load do not enter it,
so that the same job has the same digest tomorrow.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import settings as settings_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import UV
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import (
    Controller,
    Given,
    Node,
    Plan,
    Ports,
    Trainer,
    Training,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told import HIGHEST_PORT, LOWEST_PORT
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.training import Launched
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import (
    command,
    data_set,
    head,
    host_checks,
    interpreters,
    model_size,
    settings_checks,
    source_checks,
    stages,
    sync_choice,
    trainings,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.batch import BatchError
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.command import argv, choose, env
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import (
    Chooser,
    Host,
    Link,
    home_expanded,
    ranks,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.local_choice import Way
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import (
    PlanError,
    is_git,
    of_controller,
    resolved,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.shares import (
    adapted,
    core_sets,
    cores_of,
    parts_of_head,
    share_out,
    threads_of,
    weights_of,
)

FORMAT = 1
WANDB = "wandb==0.31.0"
# What a nanochat checkout imports beside the packages that its trainer and ours have in common.
UPSTREAM_PACKAGES = ("filelock<5", "jinja2<4", "psutil<8", "pyyaml<7", "requests<3", "tokenizers<1", WANDB)
SHARD_BYTES = {"url": 100_000_000, "host": 100_000_000, "controller": 100_000_000, "text": 25_000_000}
EPHEMERAL = {"low": 32768, "high": 60999}


class Outcome(NamedTuple):
    """The document, and beside it what only describes or concerns the controller alone."""

    plan: Plan
    findings: list[Finding]
    controller: Controller
    training: Launched


def make_plan(
    hosts: Sequence[Given],
    requirements: Sequence[str] = (),
    tolerant: bool = False,
    here: Mapping[str, Any] | None = None,
) -> Outcome:
    """The plan for hosts of the form {name, settings, probe, error}, in the inventory's order; error says why a probe is missing,
    and here is what the controller says to controller_questions.

    With tolerant, what stands in the way of a start is told as a finding only, and a host may lack its probe: enough to see a
    run and to stop it. Raises PlanError with all problems at once.
    """
    run, each = resolved(hosts)
    own = {name: {**settings, "ddp_fresh": run["ddp_fresh"]} for name, settings in each.items()}
    known = [
        Host(host["name"], own[host["name"]], host.get("probe") or {}, host.get("error") or "", host.get("reach"))
        for host in hosts
    ]
    training = trainings.choose(known, stages.run_name(run), run["ddp_training"])
    base = trainings.choose(known, stages.base_name(run), None, "base_run")
    known = trainings.without_others(trainings.without_others(known, training), base, "base_run")
    told = settings_utils.told([(host["name"], host["settings"]) for host in hosts])
    return Planner(run, known, requirements, tolerant, here or {}, told, (training, base)).outcome()


class Planner:
    """The steps from resolved settings to the document; every step adds what is wrong to `problems`."""

    def __init__(
        self,
        run: Mapping[str, Any],
        hosts: Sequence[Host],
        requirements: Sequence[str],
        tolerant: bool,
        here: Mapping[str, Any],
        told: set[str],
        found: tuple[trainings.Choice, trainings.Choice],
    ) -> None:
        self.trained, self.base = found
        # What the users wrote, with the defaults; nothing below changes it. `settings` is that with what was left open decided.
        self.wanted: Mapping[str, Any] = MappingProxyType(dict(run))
        self.settings = self.wanted
        self.told = told
        self.requirements = list(requirements)
        self.tolerant = tolerant
        self.here = here
        self.head_parts: dict[str, int] = {}
        self.problems: list[Finding] = []
        self.findings: list[Finding] = []
        self.shape = model_size.Shape(
            *(
                run["ddp_" + name]
                for name in ("depth", "aspect_ratio", "head_dim", "sequence", "window_pattern", "vocab_size")
            )
        )
        self.model = model_size.describe(self.shape)
        self.choice = choose(run, hosts)
        self.hosts = [host.measured_with(self.choice.matmul) for host in hosts]
        # What was asked for, beside what the plan makes of it.
        self.asked = {"sync": run["ddp_sync"], "head": run["ddp_head"], "local_steps": str(run["ddp_local_steps"])}
        self.may_lose_hosts = command.may_lose_hosts(run, len(hosts)) and run["ddp_head"] == "auto"
        if self.may_lose_hosts:
            # A part of a head that is shared out is lost with its host, and with it all steps since the last checkpoint.
            self.take_head("whole")
        self.kept_way = sync_choice.kept(run, hosts, self.choice, self.shape)
        self.take_way(self.kept_way or Way("exact", 0))

    def outcome(self) -> Outcome:
        """The plan, or every problem there is: what is wrong in the settings does not hide what is wrong with the hosts."""
        self.problems += settings_checks.problems(self.wanted, self.hosts, self.shape, self.choice)
        order, wrong = ranks(self.hosts)
        self.problems += wrong
        rows = self.rows()
        if self.problems:
            # No plan comes of it any more, but one to look at the hosts with.
            order = {host.name: rank for rank, host in enumerate(self.hosts)}
            rows = {host.name: self.settings["ddp_device_batch"] for host in self.hosts}
        self.settle_way(order, rows)
        self.settle_head(order, rows)
        chooser = Chooser(self.hosts)
        links = chooser.links()
        plan = self.document(order, links, rows)
        obstacles, remarks = host_checks.look(self.hosts, plan)
        obstacles = [
            *chooser.problems,
            *obstacles,
            *source_checks.obstacles(self.wanted, plan, self.hosts, self.here),
            *stages.obstacles(self.wanted, self.hosts, plan, self.here),
            *([] if self.wanted["ddp_fresh"] else host_checks.lost_checkpoints(self.hosts, plan)),
            *trainings.problems(self.trained, self.base, self.wanted["ddp_fresh"]),
        ]
        if self.problems or (obstacles and not self.tolerant):
            raise PlanError([*self.problems, *(() if self.tolerant else obstacles)])
        if self.choice.device == "cpu" and not self.choice.together and len(self.hosts) > 1:
            seen = f"nanochat's own trainer exchanges nothing on CPUs: each of the {len(self.hosts)} ranks would train a model of its own"
            self.findings.append(finding("trainer-apart", plan["master"]["host"], seen))
        commit = source_checks.commit(self.wanted["ddp_trainer_source"], self.here)
        others = trainings.remarks(self.trained, plan["run"])
        self.findings += [*chooser.findings, *remarks, *commit, *others, *obstacles]
        begins_again = trainings.begins(self.hosts, plan, self.trained, self.wanted["ddp_fresh"])
        training = trainings.launched(self.trained, self.base, begins_again)
        return Outcome(plan, self.findings, of_controller(self.wanted), training)

    def decide(self, **decisions: Any) -> None:
        """Settle what the settings leave open; what was wanted stays as it is, for refusals to name."""
        self.settings = MappingProxyType({**self.settings, **decisions})

    def take_way(self, way: Way) -> None:
        self.decide(**sync_choice.with_way(self.wanted, way))

    def settle_way(self, order: Mapping[str, int], rows: Mapping[str, int]) -> None:
        """What auto comes to where the hosts' steps and links have been measured; until then exact, in every step together."""
        by_rank = sorted(self.hosts, key=lambda host: order[host.name])
        if self.kept_way or "auto" not in (self.asked["sync"], self.asked["local_steps"]):
            return
        training = self.training([rows[host.name] for host in by_rank])
        way = sync_choice.measured(self.choice, by_rank, self.model, training)
        if way is not None:
            self.take_way(way)
            if self.asked["local_steps"] == "auto":
                self.findings.append(finding("local-steps-chosen", by_rank[0].name, way.why))

    def take_head(self, head: str) -> None:
        self.asked["head"] = head
        self.decide(ddp_head=head)

    def settle_head(self, order: Mapping[str, int], rows: Mapping[str, int]) -> None:
        """A run that may lose hosts keeps the head whole, unless its link makes that clearly slower."""
        by_rank = sorted(self.hosts, key=lambda host: order[host.name])
        training = self.training([rows[host.name] for host in by_rank])
        if self.may_lose_hosts and sync_choice.sharing_pays(self.choice, by_rank, self.model, training):
            self.take_head("auto")

    def rows(self) -> dict[str, int]:
        """Rows of each host in a step; what nobody set of the batch is settled with them."""
        weights = weights_of(self.split, self.hosts)
        self.problems += weights.problems
        self.findings += weights.findings
        try:
            batch = share_out({**self.wanted, "ddp_batch_split": self.split}, self.told, self.hosts, weights)
        except BatchError as error:
            self.problems.append(finding("setting-refused", "", str(error).rstrip(".")))
            return {}
        self.findings += adapted(self.wanted, batch, len(self.hosts))
        self.decide(ddp_total_batch=batch.total_batch, ddp_device_batch=batch.device_batch)
        self.head_parts = parts_of_head({**self.settings, "ddp_batch_split": self.split}, self.hosts, weights)
        return {host.name: rows for host, rows in zip(self.hosts, batch.rows)}

    @property
    def split(self) -> str:
        """Only our own trainer knows unequal shares."""
        split = str(self.settings["ddp_batch_split"])
        return "equal" if split == "auto" and not self.choice.ours else split

    @property
    def rebalances(self) -> bool:
        """Whether the shares follow the speeds while it trains."""
        run, choice = self.settings, self.choice
        able = choice.ours and choice.device == "cpu" and len(self.hosts) > 1 and not run["ddp_local_steps"]
        return bool(able and run["ddp_rebalance"] and self.split in ("auto", "speed"))

    def threads(self, host: Host) -> int:
        return threads_of(host, self.hosts)

    # The document

    def document(self, order: Mapping[str, int], links: Mapping[str, Link], rows: Mapping[str, int]) -> Plan:
        run = self.settings
        by_rank = sorted(self.hosts, key=lambda host: order[host.name])
        master = by_rank[0]
        data = data_set.document(run, self.hosts, order, self.path_here)
        plan: Plan = {
            "format": FORMAT,
            "run": self.choice.name,
            "world": len(by_rank),
            "master": {"host": master.name, "address": links[master.name].address, "port": run["ddp_port"]},
            "data_ports": self.data_ports(self.hosts),
            "narrow_ports": run["ddp_port_range"] is not None,
            "manage_firewall": run["ddp_manage_firewall"],
            "timeout_seconds": run["ddp_timeout"],
            "model": self.model,
            "training": self.training([rows[host.name] for host in by_rank]),
            "data": data,
            "trainer": self.trainer(),
            "nodes": [],
        }
        if section := stages.document(run, self.hosts, self.here, self.choice.ours):
            plan["stage"] = section
        shares = [rows[host.name] for host in by_rank]
        parts = [self.head_parts.get(host.name, 1) for host in by_rank]
        if plan["training"]["head"] == "shared" and len(set(parts)) > 1:
            plan["training"]["head_shares"] = parts
        plan["nodes"] = [self.node(host, rank, plan, links, shares) for rank, host in enumerate(by_rank)]
        keeper = command.keeper(run, len(by_rank))
        if keeper:
            plan["keeper"] = keeper
            for rank, node in enumerate(plan["nodes"]):
                command.add_keeper(run, node, plan["nodes"][:rank])
        plan["digest"] = digest_of(plan)
        return plan

    def data_ports(self, hosts: Sequence[Host]) -> Ports:
        """Where Gloo listens on these hosts: on their local ports, or on the range that they are narrowed to.

        On each host its own are opened, so that no host has a say in what the others open; and none of root's.
        """
        if self.settings["ddp_port_range"]:
            low, high = self.settings["ddp_port_range"]
            return {"low": low, "high": high}
        ranges = [host.fact("ephemeral") or EPHEMERAL for host in hosts]
        low = min(max(LOWEST_PORT, min(entry["low"], HIGHEST_PORT)) for entry in ranges)
        return {"low": low, "high": max(low, *(min(entry["high"], HIGHEST_PORT) for entry in ranges))}

    def training(self, shares: Sequence[int]) -> Training:
        run = self.settings
        tokens = run["ddp_total_batch"] * run["ddp_iterations"]
        return {
            "profile": run["ddp_profile"],
            "total_batch": run["ddp_total_batch"],
            "device_batch": run["ddp_device_batch"],
            "batch_split": run["ddp_batch_split"],
            "rows": list(shares),
            "iterations": run["ddp_iterations"],
            "tokens": tokens,
            "tokens_per_parameter": round(tokens / self.model["parameters"]["total"], 4),
            "flops": tokens * self.model["flops_per_token"],
            "sync": run["ddp_sync"] if self.choice.together else "upstream",
            "head": self.head(shares),
            "rebalance": self.rebalances,
            "asked": self.asked,
            "local_steps": run["ddp_local_steps"] if self.choice.ours else 0,
            "matmul": self.choice.matmul,
            "matmul_tried": list(self.choice.matmul_tried),
            "eval_every": run["ddp_eval_every"],
            "eval_tokens": run["ddp_eval_tokens"],
            "sample_every": run["ddp_sample_every"],
            "save_every": run["ddp_save_every"],
            "save_minutes": command.save_minutes(run, self.choice),
            "keep_checkpoints": run["ddp_keep_checkpoints"],
            # A checkout by itself knows only how to go on from a step whose files are on every host.
            "resume": run["ddp_resume"] and self.choice.goes_on,
            "tracker": run["ddp_tracker"],
            "tracker_port": run["ddp_tracker_port"],
            "tracker_bind": run["ddp_tracker_bind"],
        }

    def head(self, shares: Sequence[int]) -> str:
        """Whether the head is shared out."""
        run, shape, tokens = self.settings, self.shape, [rows * self.shape.sequence for rows in shares]
        able = head.can_share(self.choice.device, run["ddp_sync"], self.choice.ours)
        return head.choose(run["ddp_head"], able, shape.padded_vocab, shape.n_embd, tokens, run["ddp_sync"])

    def path_here(self, path: str) -> str:
        """A path of the controller as it is meant there."""
        return str(self.here.get("folders", {}).get(path, {}).get("path") or path)

    @property
    def source(self) -> str:
        if self.choice.ours:
            return "ours"
        return "git" if is_git(self.settings["ddp_trainer_source"]) else "path"

    def trainer(self) -> Trainer:
        run = self.settings
        others = [line for line in self.requirements if not line.startswith("torch==")]
        tracker = {"mlflow": ["mlflow-skinny==3.17.2"], "wandb": [WANDB]}.get(run["ddp_tracker"], [])
        trainer: Trainer = {
            "source": self.source,
            "url": {"ours": None, "path": self.path_here(run["ddp_trainer_source"])}.get(
                self.source, run["ddp_trainer_source"]
            ),
            "torch": run["ddp_torch"],
            "index": run["ddp_torch_index"],
            "python": ".".join(str(part) for part in interpreters.OLDEST_PYTHON),
            "uv": UV,
            "python_mirror": run["ddp_python_mirror"] or "",
            "requirements": [f"torch=={run['ddp_torch']}", *others, *(() if self.choice.ours else UPSTREAM_PACKAGES)],
            "tracker_requirements": tracker,
            "offline": run["ddp_trainer_offline"],
        }
        if self.choice.joined:
            trainer["joined"] = True
        return trainer

    def node(self, host: Host, rank: int, plan: Plan, links: Mapping[str, Link], shares: Sequence[int]) -> Node:
        base = host.fact("base_dir") or home_expanded(host.settings["ddp_base_dir"], host)
        venv = home_expanded(host.settings["ddp_venv_dir"] or os.path.join(base, "venv"), host)
        link = links[host.name]
        run_dir = os.path.join(base, "runs", self.choice.name)
        own = links[host.name].address
        made_with = interpreters.choose(host, self.hosts, base, self.settings["ddp_trainer_offline"])
        peers = {
            other.address for name, other in links.items() if name != host.name and other.address not in (None, own)
        }
        node: Node = {
            "host": host.name,
            "rank": rank,
            "address": link.address,
            "nic": link.nic,
            "data_ports": self.data_ports([host]),
            "user": host.fact("host", "user"),
            "base_dir": base,
            "run_dir": run_dir,
            "data_dir": os.path.join(base, "data", plan["data"]["id"]),
            "trainer_dir": os.path.join(base, "trainer"),
            # This collection's own trainer, whatever trains.
            "tools_dir": os.path.join(base, "trainer" if self.choice.ours else "tools"),
            "venv_dir": venv,
            "python": made_with["python"],
            "python_version": made_with["python_version"],
            "session": f"nanochat-{self.choice.name}-rank{rank}",
            "device": self.choice.device,
            "dtype": self.choice.dtype,
            "threads": self.threads(host),
            "cores": cores_of(host, self.hosts) if self.choice.device == "cpu" else None,
            "core_sets": core_sets(host, self.hosts) if self.choice.ours and self.choice.device == "cpu" else [],
            "rows": shares[rank],
            "head_share": self.head_parts.get(host.name, 1),
            "accumulation": -(-shares[rank] // self.settings["ddp_device_batch"]),
            "memory_bytes": self.memory(shares)["total"],
            "disk_bytes": self.disk_bytes(),
            "checkpoint_bytes": model_size.checkpoint_bytes(self.shape, self.settings["ddp_sync"]),
            "peers": sorted(peer for peer in peers if peer is not None),
            "argv": [],
            "env": {},
            "env_secret": sorted(self.settings["ddp_secret_env"]),
        }
        node["argv"] = argv(self.settings, self.choice, node, plan)
        node["env"] = env(self.settings, self.choice, node)
        return node

    def memory(self, shares: Sequence[int]) -> dict[str, int]:
        return model_size.memory(
            self.shape,
            self.settings["ddp_device_batch"],
            self.settings["ddp_sync"],
            self.choice.ours,
            self.settings["ddp_local_steps"] > 0,
            len(shares) if self.head(shares) == "shared" and not self.settings["ddp_local_steps"] else 1,
        )

    def disk_bytes(self) -> int:
        """Checkpoints that are kept and the one being written, and the shards."""
        run = self.settings
        saves = 1 + (run["ddp_iterations"] // run["ddp_save_every"] if run["ddp_save_every"] > 0 else 0)
        if command.save_minutes(run, self.choice):
            # How many come by time, nobody knows; more than are kept at a time do not stay.
            saves = max(saves, run["ddp_keep_checkpoints"] + 1)
        all_stay = run["ddp_keep_checkpoints"] < 0 or not self.choice.goes_on
        kept: int = saves if all_stay else min(saves, run["ddp_keep_checkpoints"] + 1)
        shards: int = run["ddp_data_shards"] * SHARD_BYTES[run["ddp_data_source"]]
        return kept * model_size.checkpoint_bytes(self.shape, self.settings["ddp_sync"]) + shards
