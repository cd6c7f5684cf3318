"""Scaled dot-product attention, from separate q, k, v or one packed projection."""
