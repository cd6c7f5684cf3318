"""Traces of models under PyTorch's replication and sharding, against the bare model."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker
from tests.adopt.models import llama
from tests.debug.broken import run


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("how", ["DDP", "FSDP"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapped_model_has_the_names_and_the_values_of_a_bare_one(how, fused, one_rank):
    job = llama(tied=False)
    checker = ConsistencyChecker(observe="all")
    a = run(checker, job.model, job.loss)
    model = copy.deepcopy(job.model)
    if fused:
        adopt(model)
    model = DistributedDataParallel(model) if how == "DDP" else sharded(model, one_rank)
    report = checker.compare(run(checker, model, job.loss), trace=a)
    assert report.verdict == ("within rounding" if fused else "bitwise"), str(report)
    assert len(report.rows) == (93 if fused else len(a.records))
