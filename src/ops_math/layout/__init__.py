"""Where: strides, weights that are one, and the copies that remain with their reasons."""

from ops_math.layout.adjoining import adjoining, lay_together
from ops_math.layout.copies import Copy, Report, copied, dense, report, reset
from ops_math.layout.strides import alignment, as_rows, reshaped, row_pieces

__all__ = [
    "Copy",
    "Report",
    "adjoining",
    "alignment",
    "as_rows",
    "copied",
    "dense",
    "lay_together",
    "report",
    "reset",
    "reshaped",
    "row_pieces",
]
