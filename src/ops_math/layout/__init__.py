"""Where: strides, copies and their reasons."""

from ops_math.layout.strides import as_rows, row_pieces

__all__ = ["as_rows", "row_pieces"]
