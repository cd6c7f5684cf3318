"""Measurements: one driver for whole steps, one for operators; results are appended, never edited."""
