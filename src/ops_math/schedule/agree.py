"""Ranks agree on one record: rank 0's. Only at the start and in `calibrate`; nothing here runs at a call."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from ops_math import backends, checks
from ops_math.schedule import store
from ops_math.schedule.identity import Identity, identity_of
from ops_math.schedule.live import LIVE, changed, contents_of, refuse_when_frozen, world_size
from ops_math.spec import Device


def this_device() -> Device:
    """The device that this process computes on: the current GPU, else the CPU."""
    gpu = torch.cuda.is_available()
    return backends.device_of(torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"))


def agree(group: Any = None) -> int:
    """All ranks take rank 0's record, and a hash proves that they have it. Call it after `init_process_group`, on every rank.

    With one rank there is nothing to do. Until ranks have agreed they use the shipped record and the model, which are the same everywhere.

    Args:
        group: a process group, by default all ranks.

    Returns: how many measurements all ranks now use.

    Raises: UnsupportedError where the ranks' devices or versions differ (a measurement of one would mislead the other), or while frozen.
    """
    refuse_when_frozen("agree")
    identity = identity_of(this_device())
    if world_size() == 1:
        return len(contents_of(identity).measurements)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, tuple(identity), group=group)
    for rank, theirs in enumerate(everyone):
        if Identity(*theirs) != Identity(*everyone[0]):
            where = Identity(*everyone[0]).difference(Identity(*theirs))
            checks.refuse(
                "schedule.agree", f"rank {rank} differs from rank 0: {where}", "Give all ranks one kind of device and one installation."
            )
    sent = [store.document(identity, contents_of(identity)) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    contents, wrong = store.read_document(sent[0], identity)
    mine = hashlib.blake2b(json.dumps([sent[0], wrong], sort_keys=True).encode(), digest_size=16).hexdigest()
    hashes: list[Any] = [None] * len(everyone)
    dist.all_gather_object(hashes, mine, group=group)
    if len(set(hashes)) != 1:
        checks.refuse("schedule.agree", f"the ranks read {len(set(hashes))} different records", "Report this with all ranks' versions.")
    LIVE.known[identity] = contents
    LIVE.agreed = True
    changed()
    return len(contents.measurements)
