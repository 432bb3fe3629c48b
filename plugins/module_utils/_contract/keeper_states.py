# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The states of a keeper and the events that it records, for keepers and for all that read their files (docs/membership.md)."""

from __future__ import annotations

# On the way to training or in it, and on the way out of it.
IDLE, OFFERED, PROMISED, TRAINING, ENDING = "idle", "offered", "promised", "training", "ending"
ASKING = "asking"  # its rank ended because some host was asked to stop, and it looks for the reason
STUCK = "stuck"  # its rank was to end and cannot be killed, so it takes part in nothing until that is gone
RESTING = "resting"  # its machine is needed otherwise (ddp_polite guest); it comes back by itself
# The keeper ends. AWAY: its host goes down and comes back by itself.
FINISHED, STOPPED, LEFT, FAILED, AWAY = "finished", "stopped", "left", "failed", "away"
OVER = (FINISHED, STOPPED, LEFT, FAILED, AWAY)
STATES = (IDLE, OFFERED, PROMISED, TRAINING, ENDING, ASKING, STUCK, RESTING, *OVER)

# Events beside the changes of state: a host is heard again or not any more, and checkpoints were put aside.
HEARD, LOST, GAVE_WAY = "heard", "lost", "gave way"
