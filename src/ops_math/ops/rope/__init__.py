"""Rotary position embedding of queries and keys, apart or packed with the values."""
