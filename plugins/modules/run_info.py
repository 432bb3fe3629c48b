#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: run_info
short_description: Tell what a host's share of a training run is doing
version_added: 0.1.0
description:
  - Reads the run folder of a host and returns its state, progress, speed, share of time waiting, last checkpoint, and why it crashed if it did.
  - Works while the run goes on, after its end, and before its start. It needs only the files in the folder.
  - With O(wait) it answers as soon as something changes, so a watcher needs few calls.
extends_documentation_fragment:
  - nanochat.ddp.run
  - nanochat.ddp.reader
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  rank:
    description: The rank whose files are read. Without it the rank is found from the session's name or the files in the folder.
    type: int
  lines:
    description: How many of the last lines of the log to return.
    type: int
    default: 10
  plan:
    description: Whether to return the plan that was deployed, too.
    type: bool
    default: false
  wait:
    description:
      - What the caller has seen already. The answer is held back until it differs or the time is up.
    type: dict
    suboptions:
      state:
        description: The state that is known. Another one is answered at once.
        type: str
      step:
        description: The step that is known. Another one is answered after O(wait.at_least) seconds.
        type: int
      at_least:
        description: Do not answer sooner than this many seconds for a mere new step.
        type: float
        default: 0
      timeout:
        description: Answer after this many seconds in any case.
        type: float
        default: 0
attributes:
  platform:
    platforms: posix
    support: full
seealso:
  - module: nanochat.ddp.run_watch
  - module: nanochat.ddp.run_log
"""

EXAMPLES = r"""
- name: Look at the newest run of this host
  nanochat.ddp.run_info:
    base_dir: /mnt/data/nanochat
  register: seen

- name: Wait up to a minute for the first step
  nanochat.ddp.run_info:
    run_dir: /mnt/data/nanochat/runs/d4
    wait:
      state: running
      timeout: 60
"""

RETURN = r"""
plan:
  description: >-
    The plan as it was deployed, C(plan.json) of the run folder. Empty where there is none, or where what lies there is not what was written -
    torn, edited.
  returned: with O(plan)
  type: dict
run:
  description: What the host's share of the run is doing. Every key is there in every state; what is not known is null.
  returned: always
  type: dict
  contains:
    state:
      description: >-
        V(absent) (no run folder), V(prepared) (not started), V(running), V(finished) (all steps made), V(stopped) (ended well before its last step),
        V(crashed) (also where its keeper died or gave up) or V(away) (its session has ended though the run may go on elsewhere, or has finished there).
      type: str
    run:
      description: Name of the run.
      type: str
    run_dir:
      description: The run folder.
      type: str
    plan_digest:
      description: Digest of the plan that was deployed here.
      type: str
    rank:
      description: Rank of this host.
      type: int
    world:
      description: Number of ranks.
      type: int
    exit_code:
      description: Exit code of the run.
      type: int
    signal:
      description: The signal that ended it.
      type: int
    cause:
      description: Why it was stopped or is away, as far as is known.
      type: str
    revived:
      description: How many times the job was started again in this session after it had died.
      type: int
    died_of:
      description: What it died of last.
      type: str
    membership:
      description: >-
        What the keeper of this session says or, where RV(run.state) is not V(running), said last - its C(state) (V(training), or what it does
        while it waits for other hosts), the number of the C(generation) and its C(members), C(why) it is so, C(since) when, for whom it C(waits), the
        hosts that it C(hears), all C(hosts) of the run, the C(grace) that it gives a missing one, which hosts were C(away), how many steps were
        C(repeated) after restarts, which of its own steps C(gave_way) to those of another part of the run, and where their checkpoints are C(kept).
      type: dict
    step:
      description: The last step that was made, counted from 0.
      type: int
    done:
      description: How many steps are made.
      type: int
    steps:
      description: How many steps the run has.
      type: int
    loss:
      description: Loss of the last step, the mean over all ranks. Null when it is no finite number, see RV(run.diverged).
      type: float
    diverged:
      description: Whether the last loss is no finite number.
      type: bool
    first_loss:
      description: Loss of the first step.
      type: float
    last_loss:
      description: Loss of the last step of all attempts.
      type: float
    val_bpb:
      description: Bits per byte of the last evaluation. Only rank 0 has it.
      type: float
    tokens_per_second:
      description: Speed of all ranks together over the last ten steps.
      type: float
    tokens_per_second_mean:
      description: The same over all steps of the newest attempt but its first.
      type: float
    step_seconds:
      description: Median time of a step of the newest attempt.
      type: float
    wait_seconds:
      description: Seconds that this rank has waited for other ranks, in the newest attempt.
      type: float
    wait_share:
      description: The same as a share of the time of its steps, without the first.
      type: float
    bytes_sent:
      description: What this rank has sent in a step, on average.
      type: int
    memory_bytes:
      description: Memory of the rank.
      type: int
    steps_counted:
      description: How many steps the mean speed and the share of waiting are made of.
      type: int
    rows:
      description: Rows of a step that this host takes now; before the first step those of the plan.
      type: int
    rows_before:
      description: Its rows before they were changed last in the newest attempt, where they were.
      type: int
    rows_changed:
      description: The first step with the rows of now, where they were others before.
      type: int
    compute_seconds:
      description: Median time of forward and backward passes in the newest steps with these rows.
      type: float
    optimizer_seconds:
      description: Median time of the optimizer in the same steps.
      type: float
    links:
      description: What the last rehearsal measured from this host, by the name of the other host - Mbit/s and milliseconds.
      type: dict
    plan_facts:
      description: What the speed of a step depends on of the plan. Only rank 0 has it.
      type: dict
    previous:
      description: The outputs that a fresh start set aside last. C(path), C(checkpoint) (their newest step) and C(count) of such generations.
      type: dict
    training:
      description: >-
        Which training the run folder holds - its C(id), the C(number) by which trainings of a run are ordered, and when it was C(begun). Null
        where it does not say.
      type: dict
    saved:
      description: The step of the newest checkpoint in the run folder.
      type: int
    stop_seconds:
      description: While it runs, the seconds that it may need to finish its step and save if it is asked to stop, from what it has measured.
      type: float
    sampled:
      description: Whether the metrics are so long that only their beginning and newest part were read.
      type: bool
    checkpoint:
      description: Step, time, path and bytes of the last checkpoint.
      type: dict
    pace_seconds:
      description: Seconds by the clock from one step to the next, evaluations and saves included.
      type: float
    eta_seconds:
      description: Seconds left at that pace, or of the time that the run has, while it runs.
      type: float
    share:
      description: How much of its time a run with C(ddp_budget) or C(ddp_finish_by) has used, from 0 to 1; null for others.
      type: float
    ends:
      description: When such a run ends, in seconds since 1970 by the host's clock; null for others.
      type: float
    phase:
      description: What the trainer is in the middle of.
      type: str
    phase_seconds:
      description: For how long it is in this phase or, of an evaluation, in this batch.
      type: float
    batch:
      description: The batch that an evaluation has come to.
      type: int
    batches:
      description: How many batches the evaluation has on this rank, where that is known.
      type: int
    stage:
      description: >-
        Of a run that goes on from the model of another one, its C(stage) (V(sft) or V(eval)), the run that made the model (C(base)) and, of an
        evaluation, the C(step) that is measured. An evaluation has no steps of its own.
      type: dict
    collective:
      description: The collective operation it is in or was in last.
      type: raw
    idle_seconds:
      description: Seconds since the last sign of progress, while it runs.
      type: float
    busy:
      description: >-
        Share of one core that the rank's processes used or, being ready to run, waited for during this look. Null where it was not measured.
      type: float
    session_age:
      description: Seconds since the session was started, while it runs, by the host's own clock.
      type: float
    trainer:
      description: Which trainer the plan names, V(ours), V(path) or V(git); V(joined) for a checkout whose ranks are joined.
      type: str
    timeout_seconds:
      description: The plan's time limit for what has no usual length.
      type: float
    step_age:
      description: Seconds since the last step was made, while it runs, by the host's own clock.
      type: float
    heartbeat_age:
      description: Age of the trainer's heartbeat, by the host's own clock.
      type: float
    error:
      description: Why it crashed, in one sentence.
      type: str
    end_reason:
      description: What the trainer wrote as the reason of its end.
      type: str
    end_cause:
      description: Why it ended, as a code of the trainer's (C(docs/architecture.md) lists them).
      type: str
    end_blames:
      description: The ranks at fault for the end, as far as is known.
      type: list
      elements: int
    end_error:
      description: What the trainer wrote as its error.
      type: str
    identical:
      description: Whether all ranks held identical weights when that was compared last.
      type: bool
    digest:
      description: The digest of the weights that was compared last.
      type: str
    attempts:
      description: How many times the run was started.
      type: int
    resumed_from:
      description: The step that the newest attempt resumed from.
      type: int
    started:
      description: When the session started, in seconds since the epoch.
      type: float
    ended:
      description: When it ended.
      type: float
    updated:
      description: When the last event was written.
      type: float
    stepped:
      description: When the last step of the newest attempt was made.
      type: float
    log:
      description: Path of the rank's log.
      type: str
    last_lines:
      description: The last lines of the log.
      type: list
      elements: str
"""

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import RunNameError
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import ONE_RUN
from ansible_collections.nanochat.ddp.plugins.module_utils._run.look import OPTIONS, answer


def main() -> None:
    """Read the run folder and answer."""
    module = checked_module(
        argument_spec=OPTIONS,
        **ONE_RUN,
        bounds={"lines": (0, 100000), "rank": (0, 1000000), "wait.timeout": (0, 3600), "wait.at_least": (0, 3600)},
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **answer(module.params))
    except RunNameError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
