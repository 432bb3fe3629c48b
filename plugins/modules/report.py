#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: report
short_description: Create a self-contained HTML page about a run
version_added: 0.1.0
description:
  - Makes a page from the files that M(nanochat.ddp.run_files) copied. It needs no network, and suits phones and dark mode.
  - Works during the run, and if ranks are missing. The same files make the same page.
extends_documentation_fragment:
  - nanochat.ddp.changer
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  runs:
    description: Folders of collected runs. The first is the subject, the others are for comparison.
    type: list
    elements: path
    required: true
  page:
    description: Folder with the page's parts C(report.html), C(report.css) and C(report.js), that is C(files/) of the role collect.
    type: path
    required: true
  dest:
    description: The file to write.
    type: path
    required: true
attributes:
  diff_mode:
    description: A generated page is not worth showing.
    support: none
  platform:
    platforms: posix
    support: full
seealso:
  - module: nanochat.ddp.run_files
"""

EXAMPLES = r"""
- name: Report on a run and compare it with an earlier one
  nanochat.ddp.report:
    runs:
      - ./runs/d4
      - ./runs/d4-before
    page: "{{ role_path }}/files"
    dest: ./runs/d4/report.html
  delegate_to: localhost
"""

RETURN = r"""
dest:
  description: The file.
  returned: always
  type: str
bytes:
  description: Its size.
  returned: always
  type: int
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils._kit.arguments import checked_module
from ..module_utils._kit.files import read_bytes, write_whole
from ..module_utils._run.collected import ReportError
from ..module_utils._run.report import make_report


def write(module: AnsibleModule, path: str, text: str) -> bool:
    """Write the page if it differs; all at once."""
    data = text.encode("utf-8")
    if read_bytes(path) == data:
        return False
    if not module.check_mode:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(path, data)
    return True


def main() -> None:
    """Make the page."""
    module = checked_module(
        argument_spec=dict(
            runs=dict(type="list", elements="path", required=True),
            page=dict(type="path", required=True),
            dest=dict(type="path", required=True),
        ),
        supports_check_mode=True,
    )
    try:
        text = make_report(module.params["runs"], module.params["page"])
        changed = write(module, module.params["dest"], text)
    except (ReportError, OSError) as error:
        module.fail_json(msg="The report %s could not be made. %s" % (module.params["dest"], error))
    else:
        module.exit_json(changed=changed, dest=module.params["dest"], bytes=len(text.encode("utf-8")))


if __name__ == "__main__":
    main()
