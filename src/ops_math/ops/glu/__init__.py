"""Gated linear units, an activation of one input times another, given apart or packed; and GELU alone or fused with a bias."""
