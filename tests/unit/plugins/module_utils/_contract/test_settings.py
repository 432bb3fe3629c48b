# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reading of inventory variables."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import settings, settings_table, settings_types
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import sentence
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import SettingsError, resolve


def refusal(*hosts: dict[str, Any]) -> list[str]:
    names = ["desktop", "laptop", "attic"]
    with pytest.raises(SettingsError) as caught:
        resolve(list(zip(names, hosts, strict=False)))
    return [sentence(found) for found in caught.value.findings]


def test_nothing_said_is_the_smoke_run():
    run, each = resolve([("desktop", {}), ("laptop", {})])
    wanted = {"ddp_depth": 4, "ddp_aspect_ratio": 64, "ddp_head_dim": 64, "ddp_sequence": 512, "ddp_device_batch": 2}
    assert {name: run[name] for name in wanted} == wanted
    assert (run["ddp_total_batch"], run["ddp_iterations"], run["ddp_data_source"]) == (2048, 10, "text")
    assert each["laptop"]["ddp_base_dir"] == "~/nanochat-ddp"


def test_a_given_setting_wins_over_the_profile_and_an_empty_one_does_not():
    run, dummy = resolve(
        [("desktop", {"ddp_profile": "real", "ddp_depth": 12, "ddp_iterations": None, "ddp_sequence": ""})]
    )
    assert (run["ddp_depth"], run["ddp_iterations"], run["ddp_sequence"]) == (12, 5000, 1024)


def test_words_of_the_command_line_become_numbers_and_truths():
    given = {
        "ddp_depth": "8",
        "ddp_fresh": "yes",
        "ddp_stall_factor": "2.5",
        "ddp_extra_args": '["--warmup-steps=5"]',
        "watch": "false",
    }
    run, dummy = resolve([("desktop", given)])
    assert (run["ddp_depth"], run["ddp_fresh"], run["ddp_stall_factor"], run["ddp_watch"]) == (8, True, 2.5, False)
    assert run["ddp_extra_args"] == ["--warmup-steps=5"]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("ddp_depth", "deep", 'ddp_depth is "deep" on desktop; it must be an integer of at least 1.'),
        ("ddp_depth", 4.5, "ddp_depth is 4.5 on desktop; it must be an integer of at least 1."),
        ("ddp_depth", True, "ddp_depth is true on desktop; it must be an integer of at least 1."),
        ("ddp_timeout", 3, "ddp_timeout is 3 on desktop; it must be an integer of at least 10."),
        ("ddp_port", 80, "ddp_port is 80 on desktop; it must be an integer of at least 1024."),
        ("ddp_sync", "fast", 'ddp_sync is "fast" on desktop; it must be auto, exact, bf16, int8, int4, dense or ddp.'),
        ("ddp_resume", "perhaps", 'ddp_resume is "perhaps" on desktop; it must be true or false.'),
        (
            "ddp_run",
            "my run",
            'ddp_run is "my run" on desktop; it must be 1 to 48 letters, digits, - or _, for example d4-trial.',
        ),
        (
            "ddp_base_dir",
            "nanochat",
            'ddp_base_dir is "nanochat" on desktop; it must be an absolute path, or one that begins with ~.',
        ),
        (
            "ddp_data_url",
            "ftp://x",
            'ddp_data_url is "ftp://x" on desktop; it must be a URL that begins with http:// or https://.',
        ),
        ("ddp_extra_env", {"A B": 1}, "'A B' is no name of an environment variable"),
        ("ddp_extra_env", "x=1", "it must be a dictionary of environment variables."),
        ("ddp_port_range", "40000-40010", "fewer than 100 ports"),
        ("ddp_port_range", "60000-50000", "not within 1024-65535"),
        ("ddp_stall_factor", "nan", "ddp_stall_factor"),
        ("ddp_extra_args", {"a": 1}, "not a list of words"),
        ("ddp_data_paths", "[/srv/x", "(not a list); it must be a list."),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_do(name: str, value: Any, sentence: str):
    (problem,) = refusal({name: value})
    assert sentence in problem


@pytest.mark.parametrize("text", ['["/srv/x", "/y"]', "['/srv/x', '/y']"])
def test_a_list_may_be_typed_with_either_quotes(text):
    run, dummy = resolve([("desktop", {"ddp_data_paths": text})])
    assert run["ddp_data_paths"] == ["/srv/x", "/y"]


def test_a_misspelt_setting_is_refused_with_the_nearest_name():
    (problem,) = refusal({"ddp_deph": 4})
    assert problem == "ddp_deph on desktop is not a setting of nanochat.ddp; did you mean ddp_depth?"
    (problem,) = refusal({"ddp_zzzzzzzzzzz": 4})
    assert problem.endswith("docs/settings.md lists all settings.")


def test_facts_of_the_collection_and_other_variables_are_left_alone():
    resolve([("desktop", {"ddp_probe": {}, "ddp_plan": {}, "ddp_node": {}, "ansible_host": "x", "mine": 1})])


def test_what_is_wrong_everywhere_is_told_once_and_what_is_wrong_on_one_host_names_it():
    assert refusal({"ddp_depth": 0}, {"ddp_depth": 0}) == [
        "ddp_depth is 0 on every host; it must be an integer of at least 1."
    ]
    problems = refusal({}, {"ddp_threads": "four"}, {})
    assert problems == ['ddp_threads is "four" on laptop; it must be an integer of at least 1.']


def test_all_problems_are_told_at_once():
    assert len(refusal({"ddp_depth": 0, "ddp_sink": 1, "ddp_port": "x"})) == 3


def test_field_09_hosts_that_differ_in_a_setting_of_the_run_are_refused():
    (problem,) = refusal({"ddp_depth": 4}, {"ddp_depth": 8})
    assert problem == "ddp_depth is 4 on desktop but 8 on laptop; it belongs to the whole run: set it for the group."
    (problem,) = refusal({}, {"ddp_sync": "bf16"})
    assert 'ddp_sync is not set on desktop but "bf16" on laptop' in problem


def test_secrets_do_not_show_in_a_refusal():
    (problem,) = refusal({"ddp_secret_env": {"A B": "hunter2"}})
    assert "hunter2" not in problem
    (problem,) = refusal({"ddp_secret_env": {"KEY": "hunter2"}}, {"ddp_secret_env": {"KEY": "hunter3"}})
    assert "hunter" not in problem


def test_braces_in_a_value_are_no_placeholders():
    (problem,) = refusal({"ddp_depth": "{where} {0} {"})
    assert '"{where} {0} {"' in problem


def test_every_default_and_every_value_of_a_profile_is_valid():
    for profile, values in settings_table.PROFILES.items():
        assert set(values) == set(settings_table.PROFILES["smoke"]), profile
        for name, value in {**settings.defaults(profile)}.items():
            if value is not None:
                assert settings_types.convert(settings_table.TABLE[name], value) == value


def test_each_setting_has_a_reason_of_one_line():
    assert len({setting.name for setting in settings_table.SETTINGS}) == len(settings_table.SETTINGS)
    for setting in settings_table.SETTINGS:
        assert setting.why.endswith("."), setting.name
        assert "\n" not in setting.why and len(setting.why) < 125, setting.name
        assert setting.default is not None or setting.empty, setting.name


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        ({}, 0),
        ({"ddp_profile": "real"}, 3),
        ({"ddp_profile": "real", "ddp_restarts": 0}, 0),
        ({"ddp_restarts": 5}, 5),
        ({"ddp_profile": "real", "ddp_resume": False}, 0),
        ({"ddp_profile": "real", "ddp_trainer_source": "/srv/nanochat"}, 0),
        # What somebody asks for stays, so that the plan can say why it cannot be.
        ({"ddp_restarts": 5, "ddp_resume": False}, 5),
    ],
)
def test_a_real_training_restarts_by_itself_where_its_trainer_can(given, restarts):
    run, dummy = resolve([("desktop", given), ("laptop", given)])
    assert run["ddp_restarts"] == restarts
