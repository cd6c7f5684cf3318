"""Root-mean-square normalisation, alone or fused with the residual addition before it."""
