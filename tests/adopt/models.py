"""Small models that can be adopted, each with a batch and the way to its loss."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

VOCAB, WIDTH, BATCH, SEQ = 61, 32, 2, 24
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


class Job(NamedTuple):
    """A model in training mode and a call that gives a scalar. `rows` is how many of its modules are swapped."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    swapped: int


def _drawn(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.2, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                p.add_(1.0)
    return model.train()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels[0, 3:6] = -100
    return ids, labels


def llama(tied: bool = True, layers: int = 3) -> Job:
    ids, labels = tokens()
    model = _drawn(LlamaForCausalLM(LlamaConfig(VOCAB, WIDTH, 128, layers, 4, 2, 8, tie_word_embeddings=tied)))
    return Job(model, lambda m: m(ids, labels).loss, layers + 2)


def bert(dropout: float = 0.0, labelled: float = 0.3) -> Job:
    ids, labels = tokens()
    few = labels.masked_fill(torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) > labelled, -100)
    config = BertConfig(VOCAB, WIDTH, 128, 2, 4, max_position_embeddings=SEQ, hidden_dropout=dropout, attention_dropout=dropout)
    mask = torch.arange(SEQ)[None] < torch.tensor([[SEQ], [7]])
    return Job(_drawn(BertForMaskedLM(config)), lambda m: m(ids, few, mask).loss, 4)


def encoder(norm_first: bool, padded: bool = False) -> Job:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    x = torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    hidden = torch.arange(SEQ)[None] >= torch.tensor([[SEQ], [7]]) if padded else None

    def loss(m: nn.Module) -> torch.Tensor:
        return m(x.to(next(m.parameters()).dtype), src_key_padding_mask=hidden).square().mean()

    return Job(_drawn(stack), loss, 2)


def hugging_face(family: str, **options: Any) -> Job:
    import transformers

    ids, labels = tokens()
    common = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "Bert":
        config = transformers.BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)
        model = transformers.BertForMaskedLM(config)
        mask = (torch.arange(SEQ)[None] < torch.tensor([[SEQ], [7]])).long()
        return Job(_drawn(model), lambda m: m(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(labels > 20, -100)).loss, 3)
    if family == "Mistral":
        options = {"sliding_window": 5, **options}
    config = getattr(transformers, f"{family}Config")(**common, num_key_value_heads=2, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return Job(_drawn(model), lambda m: m(input_ids=ids, labels=labels).loss, 3)


JOBS: dict[str, Callable[[], Job]] = {
    "our Llama, tied": llama,
    "our Llama, untied": lambda: llama(tied=False),
    "our BERT": bert,
    "our BERT, most tokens labelled": lambda: bert(labelled=0.9),
    "TransformerEncoder, norm first": lambda: encoder(True),
    "TransformerEncoder, norm last, padded": lambda: encoder(False, padded=True),
}
if HAS_TRANSFORMERS:
    JOBS |= {f"Hugging Face {family}": lambda family=family: hugging_face(family) for family in ("Llama", "Qwen2", "Mistral", "Bert")}  # type: ignore[misc]


def gradients(job: Job, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The loss and every parameter's gradient."""
    model = job.model if model is None else model
    model.zero_grad()
    loss = job.loss(model)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def deep(job: Job) -> Job:
    """The same in float64."""
    return dataclasses.replace(job, model=job.model.double()) if dataclasses.is_dataclass(job) else job._replace(model=job.model.double())
