"""Prove that two runs agree, or say which module first does not, forward or backward, and why."""

from ops_nn.debug.band import Band, Judgement, loss_band
from ops_nn.debug.causes import Cause
from ops_nn.debug.checker import ConsistencyChecker
from ops_nn.debug.figures import Figures
from ops_nn.debug.replay import Replay
from ops_nn.debug.replay import run as replay_file
from ops_nn.debug.report import Finding, Report
from ops_nn.debug.selfcheck import SelfCheck, selfcheck
from ops_nn.debug.trace import Key, Record, Trace

__all__ = [
    "Band",
    "Cause",
    "ConsistencyChecker",
    "Figures",
    "Finding",
    "Judgement",
    "Key",
    "Record",
    "Replay",
    "Report",
    "SelfCheck",
    "Trace",
    "loss_band",
    "replay_file",
    "selfcheck",
]
