#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: made_python
short_description: Install a Python for the trainer on a host without a recent one
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Installs a Python with uv in a folder, once and without root. Changes nothing else on the host.
  - uv downloads it, about 35 MB, from the releases of python-build-standalone on GitHub or from a mirror of them.
extends_documentation_fragment:
  - nanochat.ddp.changer
attributes:
  diff_mode:
    description: A Python is not shown.
    support: none
options:
  host:
    description: Name of this host in messages; by default its own host name.
    type: str
  path:
    description: The folder. The interpreter will be C(current/bin/python3) in it.
    type: path
    required: true
  wheels_dir:
    description: The folder with the wheel of uv, as M(nanochat.ddp.trainer_wheels) fetches it.
    type: path
    required: true
  mirror:
    description:
      - A mirror of the releases as a URL, V(file:///FOLDER) for one on this host.
      - By default the one in uv's own settings or C(UV_PYTHON_INSTALL_MIRROR).
    type: str
    default: ''
  lacking:
    description: The reason why there is no uv wheel, for the error message; empty if there is one.
    type: str
    default: ''
"""

EXAMPLES = r"""
- name: Make a Python
  nanochat.ddp.made_python:
    path: /mnt/data/nanochat/python
    wheels_dir: /mnt/data/nanochat/wheels/uv
"""

RETURN = r"""
python:
  description: The interpreter.
  returned: success
  type: str
  sample: /mnt/data/nanochat/python/current/bin/python3
reason:
  description: Why it failed, in one word.
  returned: failure
  type: str
  sample: python
"""

import functools
import os
import platform

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import PYTHON_IN_FOLDER
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import VenvError
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.made_python import is_made, make
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.module import run_with


def main() -> None:
    """Make it unless it is there."""
    module = checked_module(
        argument_spec=dict(
            host=dict(type="str"),
            path=dict(type="path", required=True),
            wheels_dir=dict(type="path", required=True),
            mirror=dict(type="str", default=""),
            lacking=dict(type="str", default=""),
        ),
        supports_check_mode=True,
    )
    given, run = module.params, functools.partial(run_with, module)
    host, folder = given["host"] or platform.node(), given["path"].rstrip("/")
    try:
        lacks = not is_made(run, folder)
        if lacks and not module.check_mode:
            make(run, folder, given["wheels_dir"], host, given["mirror"], given["lacking"])
    except VenvError as why:
        module.fail_json(msg=str(why), reason=why.reason)
    except OSError as why:
        module.fail_json(msg=f"{host}: {why.filename or folder}: {why.strerror or why}", reason="folder")
    module.exit_json(changed=lacks, python=os.path.join(folder, PYTHON_IN_FOLDER))


if __name__ == "__main__":
    main()
