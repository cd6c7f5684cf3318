"""The loss of a language model without its logits: hidden states and the head's weight go in, the mean loss comes out."""

import torch
import torch.nn.functional as F

import ops_math as om

tokens, width, vocabulary = 512, 128, 4096
torch.manual_seed(0)
hidden = torch.randn(tokens, width, requires_grad=True)
head = torch.nn.Parameter(torch.randn(vocabulary, width) / width**0.5)
target = torch.randint(0, vocabulary, (tokens,))
target[::7] = -100  # padding is not counted

optimizer = torch.optim.SGD([head], lr=10.0)
first = last = 0.0
for _ in range(10):
    loss = om.linear_cross_entropy(hidden, head, target, label_smoothing=0.1)
    reference = F.cross_entropy(hidden @ head.T, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, reference)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    first, last = first or loss.item(), loss.item()

print(f"loss {first:.3f} -> {last:.3f}")
print(f"logits that never existed whole: {tokens * vocabulary * 4 / 2**20:.0f} MiB")
print(om.stats())
