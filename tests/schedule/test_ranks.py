"""Ranks whose caches differ end with one record, rank 0's; until they have agreed they use none."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts two processes
ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import os, sys, torch, torch.distributed as dist
import ops_math as om
from ops_math import schedule
from ops_math.schedule.live import add, contents_of
from ops_math.schedule.identity import identity_of
from tests.schedule.test_choice import real, reason_of_softmax, CPU
rank = int(os.environ["RANK"])
x, found = real(winner="eager" if rank == 0 else "vendor")
add(CPU, [found], save=False)
alone = reason_of_softmax(x)
assert alone == ("eager" if rank == 0 else "vendor", "fastest measured on this device"), alone
dist.init_process_group("gloo")
schedule.reread() if os.environ.get("FORGET") else schedule.live.changed()
"""

AGREE = """
if rank == 1:
    add(CPU, [found._replace(problem="p of rank 1")], save=False)
before = reason_of_softmax(x)
not_agreed = "(the ranks have not agreed on measurements: call ops_math.schedule.agree())"
assert before[1].endswith(not_agreed) or before[1] == "fastest measured", before
assert schedule.agree() == 1
after = reason_of_softmax(x)
assert after == ("eager", "fastest measured on this device"), after
assert [m.problem for m in contents_of(CPU).measurements.values()] == [found.problem]
with schedule.first_use(0.2):
    om.softmax(torch.randn(7, 9))
assert len(contents_of(CPU).measurements) == 1, "a rank must not measure for itself"
print("agreed")
"""

CALIBRATE = """
def step():
    om.softmax(torch.randn(24, 40))
    if rank == 1:
        om.rms_norm(torch.randn(24, 56))
found = om.calibrate(step, seconds=2, save=False)
assert [m.op for m in found.measurements] == (["softmax"] if rank == 0 else ["rms_norm"]), found
rows = sorted((m.op, m.winner, tuple(m.times_us.items())) for m in contents_of(CPU).measurements.values())
theirs = [None, None]
dist.all_gather_object(theirs, rows)
assert theirs[0] == theirs[1], theirs
assert {"softmax", "rms_norm"} <= {row[0] for row in rows}, rows
print("agreed")
"""

DIFFER = """
import sys
if rank == 1:
    honest = identity_of
    schedule.agree.__globals__["identity_of"] = lambda device: honest(device)._replace(driver="another")
try:
    schedule.agree()
except om.UnsupportedError as error:
    assert str(error).startswith("schedule.agree: rank 1 differs from rank 0: driver another, here none. Give all ranks"), error
    print("agreed")
"""


def run_ranks(code: str, tmp_path: Path, **environment: str) -> list[str]:
    """Two gloo processes; what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **environment}
    running = []
    for rank in range(2):
        own = {**shared, "RANK": str(rank), "OPS_MATH_CACHE": str(tmp_path / str(rank))}
        command = [sys.executable, "-c", SETUP + code + "\ndist.destroy_process_group()\n"]
        running.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = []
    for process in running:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-3000:]
        said.append(out.strip())
    return said


@pytest.mark.parametrize(("name", "code"), [("agree", AGREE), ("calibrate", CALIBRATE), ("differ", DIFFER)])
def test_two_ranks(name, code, tmp_path):
    assert run_ranks(code, tmp_path, FORGET="1" if name == "calibrate" else "") == ["agreed", "agreed"]
