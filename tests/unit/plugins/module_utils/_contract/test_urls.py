# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Credentials in URLs of settings are refused and never shown."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import resolve
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.validate import has_credentials, masked

WITH = [
    "https://me:secret@pypi.example.org/simple", "HTTPS://secret@github.com/me/nanochat.git", "http://me:p@secret@example.org/",
    "ssh://git:secret@github.com/x", "--uri=https://me:secret@example.org", "git+https://secret@github.com/x",
]  # fmt: skip
WITHOUT = [
    "https://example.org/a@b", "git@github.com:karpathy/nanochat.git", "ssh://git@github.com/x", "file:///srv/a@b", "/srv/me:x@y", "auto",
    "https://example.org/?mail=a@b",
]  # fmt: skip


def test_what_tells_who_asks_is_seen_and_masked():
    assert [text for text in WITH if not has_credentials(text) or "secret" in masked(text)] == []
    assert [text for text in WITHOUT if has_credentials(text) or masked(text) != text] == []


SETTINGS = {
    "ddp_data_url": WITH[0],
    "ddp_extra_args": ["--seed=1", WITH[4]], "ddp_extra_env": {"HTTPS_PROXY": WITH[0]}, "ddp_data_paths": [WITH[0]],
    "ddp_results_dir": WITH[3],
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_takes_them_and_no_message_shows_them(name):
    with pytest.raises(PlanError, match=r"a URL with a password or token in it.*netrc.*ddp_secret_env") as why:
        resolve([("desktop", {name: SETTINGS[name]})])
    assert "secret@" not in str(why.value) and ":secret" not in str(why.value) and name in str(why.value)


def test_a_secret_variable_may_hold_one():
    asked = resolve([("desktop", {"ddp_secret_env": {"HTTPS_PROXY": WITH[0]}})])
    assert asked.run.secret_env == {"HTTPS_PROXY": WITH[0]}
