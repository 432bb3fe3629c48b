# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan as an action: where settings and probes come from, what is printed and kept."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements import plan as action
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts


@pytest.fixture
def run(agent):
    """The action with these options and variables of the hosts, or, if `whole`, of the play."""

    def act(arguments: dict[str, Any], variables: dict[str, Any], check: bool = False, whole: bool = False) -> Any:
        known = variables if whole else {"hostvars": variables}
        return agent(variables=known, check=check, **{"verb": "make_plan", **arguments})

    return act


def variables(**more: Any) -> dict[str, Any]:
    return {
        host["name"]: {**host["settings"], **more, "ddp_probe": host["probe"], "ansible_host": "10.0.0.9"}
        for host in hosts()
    }


BOTH = ["desktop", "laptop"]


def test_all_problems_fail_the_task_with_one_text_and_a_list(run):
    result = run({"hosts": BOTH}, variables(ddp_depth="x", ddp_sinc=1))
    assert result["failed"] is True and len(result["problems"]) == 2
    assert result["msg"].startswith("2 problems; nothing was changed:\n- ddp_depth")
    assert "attic is not a host of the inventory." in run({"hosts": ["attic"]}, variables())["msg"]
    assert result["problems"][0]["code"] == "setting-refused"


def test_questions_come_before_any_probe(run):
    known = {name: {"ansible_host": f"{name}.lan"} for name in BOTH}
    known["laptop"]["ansible_connection"] = "local"
    result = run({"hosts": BOTH, "verb": "read_questions"}, known)
    assert [result["questions"][name]["peers"] for name in ("laptop", "desktop")] == [["desktop.lan"], []]


@pytest.mark.parametrize("become", [True, "yes", "no", None])
def test_no_command_line_makes_training_root(run, become):
    play = {"hostvars": variables(), "ansible_become": become}
    told = run({"verb": "read_questions", "hosts": BOTH}, play, whole=True)
    assert ("training would run as root" in told.get("msg", "")) is (become in (True, "yes"))
    # As the inventory's user it may, and the plan says so.
    known = variables()
    known["laptop"]["ddp_probe"]["host"]["user"] = "root"
    line = "laptop: training runs as root, the user of the inventory; ansible_user names another"
    assert line in run({"hosts": BOTH}, known)["text"]


def test_only_variables_of_the_job_are_looked_at(run):
    class Known(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            assert name.startswith(("ddp_", "watch")), f"{name} was worked out though nobody needs it"
            return super().__getitem__(name)

    more = {"broken": "{{ nonsense }}", "watch": "no", "ddp_results_dir": "mine"}
    known = {name: Known(values, **more) for name, values in variables().items()}
    controller = run({"hosts": BOTH}, known)["controller"]
    assert controller == {"watch": False, "fresh": False, "results_dir": os.path.realpath("mine")}


def test_a_variable_that_cannot_be_worked_out_is_named(run):
    class Known(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "ddp_run":
                raise AnsibleError("'nothing' is undefined")
            return super().__getitem__(name)

    known = {name: Known(values, ddp_run=None) for name, values in variables().items()}
    result = run({"hosts": BOTH}, known)
    [problem] = result["problems"]
    assert (problem["code"], problem["host"]) == ("setting-refused", "desktop")
    assert problem["seen"] == "ddp_run of desktop cannot be evaluated: 'nothing' is undefined"


def test_what_a_rehearsal_measured_wins_over_what_a_host_kept(run):
    fast, slow = ({"tokens_per_second": speed} for speed in (900.0, 300.0))
    known = variables()
    known["desktop"]["ddp_probe"]["measured"], known["laptop"]["ddp_probe"]["measured"] = slow, fast
    measured = {"desktop": {"measured": fast}, "laptop": {"measured": slow}}
    assert run({"hosts": BOTH, "measured": measured}, known)["plan"]["training"]["rows"] == [3, 1]


def test_the_plan_is_kept_in_a_file(run, tmp_path):
    asked = {"hosts": BOTH, "file": str(tmp_path / "deep" / "plan.json")}
    assert run(asked, variables(), check=True)["changed"] and not (tmp_path / "deep").exists()
    assert [run(asked, variables())["changed"] for dummy in range(2)] == [True, False]


def test_a_file_that_cannot_be_written_is_said_in_one_sentence(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        AnsibleError, match=r"The plan could not be written to .*file/plan\.json on the controller: File exists"
    ):
        run({"hosts": BOTH, "file": str(tmp_path / "file" / "plan.json")}, variables())


@pytest.mark.parametrize(
    ("show", "callback", "parts", "not_shown"),
    [
        ("text", "default", ["Run d4 on 2 hosts", "threads-over-cores  laptop"], "By hand"),
        ("text", "nanochat.ddp.story", ["Run d4 on 2 hosts"], "threads-over-cores"),
        ("whole", "default", ["Run d4 on 2 hosts", "By hand"], "The whole plan:"),
        ("json", "default", ['"digest"'], "Run d4"),
        ("none", "default", [], "Run d4"),
    ],
)
def test_what_is_printed(run, monkeypatch, show, callback, parts, not_shown):
    printed: list[str] = []
    monkeypatch.setattr(action.display, "display", printed.append)
    monkeypatch.setattr(action._configuration.constants, "DEFAULT_STDOUT_CALLBACK", callback, raising=False)
    run({"hosts": BOTH, "show": show}, variables(ddp_threads=99))
    told = "".join(printed)
    assert all(part in told for part in parts) and not_shown not in told and bool(told) == (show != "none")


def test_a_limit_that_leaves_hosts_out_is_refused_unless_one_only_looks(run):
    known = variables()
    limited = {"hostvars": known, "ansible_play_hosts_all": ["laptop"]}
    assert "desktop is excluded by --limit" in run({"hosts": BOTH}, limited, whole=True)["msg"]
    assert run({"hosts": BOTH, "tolerant": True}, limited, whole=True)["plan"]["world"] == 2


def test_field_41_what_no_play_can_set_is_told_with_the_lines_to_add(monkeypatch):
    lacking, known = action._configuration.lacking, action._configuration.constants
    for name, value in (("DEFAULT_FORKS", 5), ("DEFAULT_STDOUT_CALLBACK", "yaml"), ("INJECT_FACTS_AS_VARS", False)):
        monkeypatch.setattr(known, name, value, raising=False)
    assert lacking(5) == ""
    assert lacking(64) == (
        "Ansible handles 5 hosts at a time and the job has 64; "
        "add to ansible.cfg below [defaults]: forks = 64 (or once: --forks 64)"
    )
    monkeypatch.setattr(known, "DEFAULT_STDOUT_CALLBACK", "default", raising=False)
    monkeypatch.delenv("ANSIBLE_STDOUT_CALLBACK", raising=False)
    assert "forks = 64 and stdout_callback = nanochat.ddp.story (or once: --forks 64)" in lacking(64)
    assert lacking(2).endswith("below [defaults]: stdout_callback = nanochat.ddp.story")
    monkeypatch.setattr(known, "DEFAULT_STDOUT_CALLBACK", "yaml", raising=False)
    monkeypatch.setattr(known, "INJECT_FACTS_AS_VARS", True, raising=False)
    wanted = "Ansible turns facts from hosts into play variables; add to ansible.cfg below [defaults]: inject_facts_as_vars = false"
    assert lacking(2) == wanted
