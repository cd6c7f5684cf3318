"""Layer normalisation, alone or fused with the bias, the dropout and the residual addition before it."""
