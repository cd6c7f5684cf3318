"""`ops-math train`: train a real model on real text, alone or beside plain PyTorch and torch.compile."""
