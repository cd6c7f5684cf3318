"""Where: strides, copies and their reasons."""

from ops_math.layout.strides import as_rows

__all__ = ["as_rows"]
