"""Cross entropy of logits, and of a linear layer whose logits never exist whole."""
