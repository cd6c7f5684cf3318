"""How: which implementation and configuration runs a problem."""

from ops_math.schedule.choose import Choice, choose
from ops_math.schedule.record import Record, load_shipped

__all__ = ["Choice", "Record", "choose", "load_shipped"]
