"""What a measurement belongs to: this device, its driver, these versions of PyTorch and Triton, these sources of an operator."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ops_math import backends
from ops_math.spec import Device, Implementation


class Identity(NamedTuple):
    """Where measurements hold. `cores` counts multiprocessors, on a CPU the threads that PyTorch uses; `driver` is empty on a CPU."""

    kind: str
    name: str
    arch: str
    cores: int
    driver: str
    torch: str
    triton: str

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits."""
        return hashlib.blake2b(repr(tuple(self)).encode(), digest_size=4).hexdigest()

    @property
    def file_name(self) -> str:
        """`schedule-nvidia-h200-1a2b3c4d.json`: each device and set of versions has a file of its own."""
        return f"schedule-{re.sub('[^a-z0-9]+', '-', self.name.lower()).strip('-')[:40]}-{self.digest}.json"

    def difference(self, other: Identity) -> str:
        """In words where another one differs: `torch 2.12.0, here 2.13.0`."""
        pairs = zip(self._fields, other, self, strict=True)
        return ", ".join(f"{field} {theirs or 'none'}, here {ours or 'none'}" for field, theirs, ours in pairs if theirs != ours)


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The installed Triton's version, empty without one; Triton is not imported for it."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def identity_of(device: Device) -> Identity:
    """The identity of a device of this machine."""
    name = backends.processor_name() if device.kind in ("cpu", "interpreter") else device.name
    cores = torch.get_num_threads() if device.kind in ("cpu", "interpreter") else device.num_cores
    return Identity(device.kind, name, device.arch, cores, backends.driver_version(device.kind), str(torch.__version__), triton_version())


def source_of(implementation: Implementation) -> str:
    """A digest of all that an operator runs: its folder, the tile functions that it shares, and how kernels are started."""
    return _source_of(implementation.module_name.rpartition(".")[0])


@lru_cache(maxsize=256)
def _source_of(package: str) -> str:
    found = importlib.util.find_spec(package) if package else None
    if found is None or not found.submodule_search_locations:
        return "no-sources"
    folder = Path(found.submodule_search_locations[0])
    digest = hashlib.blake2b(digest_size=8)
    for place in (folder, folder.parent / "_tiles"):
        for path in sorted(place.glob("*.py")) if place.is_dir() else []:
            if not path.name.startswith("test_"):
                digest.update(path.name.encode() + path.read_bytes())
    digest.update(Path(backends.__file__).with_name("launch.py").read_bytes())
    return digest.hexdigest()
