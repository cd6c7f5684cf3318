"""Adopted models under PyTorch's sharding and replication: the layers' own parameters alone are read in their forwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ops_math as om
from ops_nn.adopt import adopt
from tests.adopt.models import JOBS, bert, encoder, gradients, llama


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def assert_same(ours, expected) -> None:
    largest = max(float(g.norm()) for g in expected.values())
    for key, value in expected.items():
        got = ours[key].full_tensor() if isinstance(ours[key], DTensor) else ours[key]
        assert (got - value).norm() <= 1e-5 * max(float(value.norm()), 1e-2 * largest), key


@pytest.mark.parametrize("make", [llama, bert, lambda: encoder(True)], ids=["Llama", "BERT", "TransformerEncoder"])
@pytest.mark.parametrize("first", ["adopt", "shard"])
def test_layers_under_fsdp_are_fused_and_give_the_same_gradients(make, first, one_rank):
    job = make()
    expected = gradients(job)
    layers = [m for m in job.model.modules() if type(m).__name__.endswith(("DecoderLayer", "BertLayer", "EncoderLayer"))]

    def shard() -> None:
        for layer in layers:
            fully_shard(layer, mesh=one_rank)
        fully_shard(job.model, mesh=one_rank)

    if first == "adopt":
        adopt(job.model)
        shard()
    else:
        shard()
        adopt(job.model)
    om.reset_stats()
    assert_same(gradients(job), expected)
    rows = om.stats().rows
    assert [row.fallback for row in rows if row.phase == "block"] == []
    assert sum(row.calls for row in rows if row.op == "attention" and row.phase == "bwd") == len(layers)


@pytest.mark.parametrize("name", [name for name in JOBS if "Hugging" not in name])
def test_data_parallel_models_are_adopted_inside(name, one_rank):
    job = JOBS[name]()
    expected = gradients(job)
    parallel = torch.nn.parallel.DistributedDataParallel(job.model)
    adopt(parallel)
    found = {key.removeprefix("module."): g for key, g in gradients(job, parallel).items()}
    assert_same(found, expected)
