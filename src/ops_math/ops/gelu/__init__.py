"""Gaussian error linear unit, alone or fused with the bias before it."""
