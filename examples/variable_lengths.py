"""Documents of unequal length in one batch: packed, each is computed as if it were alone, and nothing but a rest is padding."""

import torch
import torch.nn.functional as F

import ops_math as om
from ops_nn.adopt import adopt
from ops_nn.data import pack_documents, trim_to_longest
from ops_nn.models import build

torch.manual_seed(0)
documents = [torch.randint(8192, (length,)) for length in (200, 17, 90, 3, 64, 130)]

batch = pack_documents(documents, row_length=256)
print(f"{batch.num_tokens} tokens in {list(batch.input_ids.shape)}, documents begin at {batch.cu_seqlens.tolist()}")

model = build("llama-tiny").train()
adopt(model)
packed = model(**batch.model_inputs()).loss

# the same documents one by one, by plain PyTorch
with om.enabled(False), torch.no_grad():
    total = sum(F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum") for text in documents)
alone = total / sum(len(text) - 1 for text in documents)
print(f"loss packed {packed.item():.6f}, one by one {alone.item():.6f}")
torch.testing.assert_close(packed.detach(), alone, rtol=1e-5, atol=0.0)

# where a batch is padded already: cut it to its longest, rounded up
mask = torch.arange(512)[None] < torch.tensor([[len(text)] for text in documents])
ids = torch.zeros(mask.shape, dtype=torch.int64)
mask, ids = trim_to_longest(mask, ids, multiple=64)
print(f"trimmed from 512 to {ids.shape[1]}")
assert ids.shape[1] == 256
