"""How: which implementation and configuration runs a problem, by measurement where there is one, else by a model of the device."""

from ops_math.schedule.agree import agree
from ops_math.schedule.calibrate import Calibration, calibrate
from ops_math.schedule.choose import Choice, choose
from ops_math.schedule.explain import Explanation, explain
from ops_math.schedule.first_meeting import met
from ops_math.schedule.live import (
    export,
    first_use,
    freeze,
    load,
    load_state_dict,
    record_for,
    register,
    reread,
    state_dict,
    thaw,
)
from ops_math.schedule.measure import Limits, measure
from ops_math.schedule.record import Ceilings, Measurement, Record, load_shipped
from ops_math.schedule.store import ScheduleWarning
from ops_math.schedule.trial import NotMeasuredError

__all__ = [
    "Calibration",
    "Ceilings",
    "Choice",
    "Explanation",
    "Limits",
    "Measurement",
    "NotMeasuredError",
    "Record",
    "ScheduleWarning",
    "agree",
    "calibrate",
    "choose",
    "explain",
    "export",
    "first_use",
    "freeze",
    "load",
    "load_shipped",
    "load_state_dict",
    "measure",
    "met",
    "record_for",
    "register",
    "reread",
    "state_dict",
    "thaw",
]
