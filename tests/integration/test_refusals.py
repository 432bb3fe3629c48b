# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan names every obstacle to a run in a sentence with host and path, before anything is changed."""

from __future__ import annotations

import getpass
import os
import shutil

from ansible_collections.nanochat.ddp.tests.integration.local import one_line


def test_hosts_and_folders_that_cannot_be_used_are_told_before_anything_is_changed(make_lan, tmp_path):
    lan = make_lan(3)
    for number in (0, 1, 2):
        (tmp_path / f"h{number}").mkdir()
    (tmp_path / "empty").mkdir()
    tmux = shutil.which("tmux")
    assert tmux
    lan.preludes[0] += f"mount -t tmpfs -o size=30m,mode=0755 full {tmp_path}/h0;"
    lan.preludes[1] += (
        f"mount -t tmpfs -o ro,mode=0755 still {tmp_path}/h1; mount --bind /dev/null {os.path.realpath(tmux)};"
    )
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    done = lan.playbook(
        "nanochat.ddp.train",
        ddp_data_source="text",
        ddp_data_host="h2",
        ddp_data_paths=[f"{tmp_path}/nothing", f"{tmp_path}/empty"],
        ddp_results_dir="/dev/null/runs",
        ddp_trainer_source=f"{tmp_path}/empty",
        ddp_total_batch=3072,
    )

    told = one_line(done.stdout)
    print(done.stdout)
    assert done.returncode != 0
    assert "7 problems; nothing was changed" in told
    assert f" MB free below {tmp_path}/h0, but checkpoints, data and software need about" in told
    assert f"ddp_base_dir is {tmp_path}/h1 on h1, but {getpass.getuser()} cannot write to {tmp_path}/h1 there" in told
    assert "h1 has no tmux, which training needs" in told
    assert f"ddp_data_paths names {tmp_path}/nothing, which does not exist on h2" in told
    assert f"ddp_data_paths names {tmp_path}/empty, which has no files on h2" in told
    assert f"{tmp_path}/empty on the controller has no scripts/base_train.py" in told
    assert "ddp_results_dir is /dev/null/runs, which is not writable on the controller" in told
    assert "Traceback" not in done.stdout + done.stderr
    own = ("hosts.json", "python-")
    after = sorted(str(path) for path in tmp_path.rglob("*") if not path.name.startswith(own))
    assert after == before
