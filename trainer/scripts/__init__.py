# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people start with `python -m scripts.NAME` from trainer/."""

import os

# torch reads this when it is imported. Its warnings carry C++ stacks, and we say in a sentence what they are about.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
