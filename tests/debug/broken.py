"""Pairs of models of which the second has one fault, each with where it is and what it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ops_nn.adopt import adopt
from ops_nn.models.bert import BertIntermediate
from ops_nn.models.llama import LlamaAttention, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM, LlamaRotaryEmbedding, apply_rotary
from tests.adopt.models import VOCAB, WIDTH, _drawn, tokens
from tests.adopt.models import bert as bert_job
from tests.adopt.models import llama as llama_job


class Fault(NamedTuple):
    """A faulty pair: `step` runs forward and backward; `module`, `direction` and the kind of the `cause` are what must be said."""

    a: nn.Module
    b: nn.Module
    step: Callable[[nn.Module], torch.Tensor]
    module: str
    direction: str
    cause: str


class TanhIntermediate(BertIntermediate):
    def forward(self, hidden):
        return F.gelu(self.dense(hidden), approximate="tanh")


class OtherAttention(LlamaAttention):
    """Attention whose scores are masked or scaled otherwise."""

    def _attend(self, q, k, v):
        raise NotImplementedError

    def forward(self, x, position_embeddings):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        out = self._attend(apply_rotary(q, *position_embeddings), apply_rotary(k, *position_embeddings), v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class LastTokenBlind(OtherAttention):
    def _attend(self, q, k, v):
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        mask[-1, -1] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class WrongScale(OtherAttention):
    def _attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=1.0 / self.head_dim)


class InBf16(LlamaDecoderLayer):
    def forward(self, x, position_embeddings):
        tables = tuple(t.bfloat16() for t in position_embeddings)
        return super().forward(x.bfloat16(), tables).to(x.dtype)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return 0.5 * dy


class HalfValue(nn.Linear):
    """Its result is right, and so is its weight's gradient; the gradient of its input is half of it."""

    def forward(self, x):
        return super().forward(_HalfGradient.apply(x))


def backward_of(loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], torch.Tensor]:
    def step(model):
        found = loss(model)
        found.backward()
        return found

    return step


def tanh_gelu() -> Fault:
    job = bert_job()
    b = copy.deepcopy(job.model)
    b.bert.encoder.layer[1].intermediate.__class__ = TanhIntermediate
    return Fault(job.model, b, job.loss, "bert.encoder.layer.1.intermediate", "forward", "tanh GELU")


def other_eps() -> Fault:
    ids, labels = tokens()
    a = _drawn(LlamaForCausalLM(LlamaConfig(VOCAB, WIDTH, 128, 3, 4, 2, 8, rms_norm_eps=1e-6)))
    b = copy.deepcopy(a)
    b.model.layers[0].input_layernorm.variance_epsilon = 1e-5
    return Fault(a, b, lambda m: m(ids, labels).loss, "model.layers.0.input_layernorm", "forward", "eps")


def blind_last_token() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    b.model.layers[1].self_attn.__class__ = LastTokenBlind
    return Fault(job.model, b, job.loss, "model.layers.1.self_attn", "forward", "mask")


def layer_in_bf16() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    b.model.layers[1].to(torch.bfloat16)
    b.model.layers[1].__class__ = InBf16
    return Fault(job.model, b, job.loss, "model.layers.1", "forward", "dtype")


def dropped_bias() -> Fault:
    job = bert_job()
    b = copy.deepcopy(job.model)
    b.bert.encoder.layer[0].attention.output.dense.bias = None
    return Fault(job.model, b, job.loss, "bert.encoder.layer.0.attention.output.dense", "forward", "dropped bias")


def accumulated_in_bf16() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    weight = b.model.layers[1].mlp.down_proj.weight

    def rounded(p):
        p.grad.copy_(p.grad.bfloat16())

    weight.register_post_accumulate_grad_hook(rounded)
    ids, labels = tokens()

    def loss(m):
        for _ in range(3):
            m(ids[:1], labels[:1]).loss.backward()
        return m(ids[1:], labels[1:]).loss

    return Fault(job.model, b, loss, "model.layers.1.mlp.down_proj", "parameter gradient", "bf16 accumulation")


def untied() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    b.lm_head.weight = nn.Parameter(b.lm_head.weight.detach().clone())
    return Fault(job.model, b, job.loss, "lm_head", "parameter gradient", "tied weights")


def half_of_the_first_gradient() -> Fault:
    job = llama_job(tied=False)
    a = job.model.bfloat16()
    b = copy.deepcopy(a)
    adopt(b)

    def halved(p):
        p.grad.mul_(0.5)

    b.model.layers[0].self_attn.q_proj.weight.register_post_accumulate_grad_hook(halved)
    return Fault(a, b, job.loss, "model.layers.0.self_attn.q_proj", "parameter gradient", "factor")


def rotary_base() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    b.model.rotary_emb = LlamaRotaryEmbedding(dataclasses.replace(b.config, rope_theta=500_000.0))
    return Fault(job.model, b, job.loss, "model.rotary_emb", "forward", "rotary")


def attention_scale() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    b.model.layers[2].self_attn.__class__ = WrongScale
    return Fault(job.model, b, job.loss, "model.layers.2.self_attn", "forward", "scale of attention")


def half_input_gradient() -> Fault:
    job = llama_job()
    b = copy.deepcopy(job.model)
    b.model.layers[1].mlp.down_proj.__class__ = HalfValue
    return Fault(job.model, b, job.loss, "model.layers.1.mlp.down_proj", "input gradient", "factor")


FAULTS: dict[str, Callable[[], Fault]] = {
    "exact GELU exchanged for tanh GELU": tanh_gelu,
    "eps 1e-5 for 1e-6": other_eps,
    "a mask off by one at the last token": blind_last_token,
    "one layer in bf16": layer_in_bf16,
    "a bias dropped": dropped_bias,
    "gradients accumulated in bf16": accumulated_in_bf16,
    "weights tied in one and not in the other": untied,
    "a first-layer gradient 50 % off": half_of_the_first_gradient,
    "wrong rotary base": rotary_base,
    "scale of attention": attention_scale,
    "an input gradient 50 % off": half_input_gradient,
}


def run(checker: Any, model: nn.Module, step: Callable[[nn.Module], torch.Tensor], backward: bool = True) -> Any:
    """Trace one step."""
    model.zero_grad()
    with checker.trace(model) as trace:
        loss = step(model)
        if backward:
            loss.backward()
    return trace
