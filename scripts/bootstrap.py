"""Make the virtual environment that the Makefile works in, or find in a blink that it is up to date.

Run by any Python 3.11 to 3.13, with nothing installed. torch goes in first and alone: it is the one large download, and a
resolver that sees it among other requirements is free to pick another build of it.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOWEST, HIGHEST = (3, 11), (3, 13)
TORCH_LOWEST, TORCH_BEYOND = (2, 11), (2, 15)
STAMP = "ops-math.stamp"
SHARED_PACKAGES = "ops_math_shared_packages.pth"


def main() -> None:
    """Read the arguments, compare the stamp, install what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="the torch to install, as pip writes it")
    parser.add_argument("--torch-is-a-wish", action="store_true", help="install --torch even where the interpreter has a torch")
    parser.add_argument("--reuse-torch", action="store_true", help="use the torch that this interpreter can import, if it can")
    options = parser.parse_args()
    options.venv = options.venv.absolute()
    check_interpreter()
    state = fingerprint(options)
    stamp = options.venv / STAMP
    if stamp.exists() and stamp.read_text() == state and venv_python(options.venv).exists():
        return
    python = make_venv(options.venv)
    (Path(site_packages(python)) / SHARED_PACKAGES).unlink(missing_ok=True)
    shares = options.reuse_torch and share_packages(options.venv, python)
    if not shares or options.torch_is_a_wish:
        pip(python, "install", options.torch)
    pip(python, "install", "-r", str(ROOT / "requirements" / "dev.txt"))
    if not can_import(python, "triton"):
        pip(python, "install", "-r", str(ROOT / "requirements" / "triton.txt"))
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    check_torch(python)
    stamp.write_text(state)


def check_interpreter() -> None:
    """Stop in words when this Python is not one that the project supports."""
    if not LOWEST <= sys.version_info[:2] <= HIGHEST:
        stop(f"Python 3.11 to 3.13 is needed, and {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.12 ...")


def fingerprint(options: argparse.Namespace) -> str:
    """Return a line that changes whenever the environment would have to be made anew."""
    files = [Path(__file__), ROOT / "pyproject.toml", *sorted((ROOT / "requirements").glob("*.txt"))]
    said = [sys.version, str(Path(sys.executable).resolve()), options.torch, options.torch_is_a_wish, options.reuse_torch, str(ROOT)]
    digest = hashlib.sha256(json.dumps(said).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def venv_python(venv: Path) -> Path:
    """Return the interpreter inside a virtual environment."""
    return venv / "bin" / "python"


def make_venv(venv: Path) -> Path:
    """Create the environment unless it is there with this Python's version; return its interpreter."""
    python = venv_python(venv)
    if python.exists():
        there = subprocess.run([python, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True, check=False)
        if there.stdout.strip() == str(sys.version_info[:2]):
            return python
        if Path(sys.prefix).resolve() == venv.resolve():
            stop(f"{sys.executable} lives in {venv} and cannot replace it: name another interpreter with PYTHON=...")
    tell(f"creating {venv} with Python {sys.version.split()[0]}")
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    if subprocess.run(command, check=False).returncode:
        stop(f"`{' '.join(command)}` failed; on Debian and Ubuntu the package python3-venv is needed.")
    return python


def share_packages(venv: Path, python: Path) -> bool:
    """Let the environment see this interpreter's packages if torch is among them; say whether it is.

    `--system-site-packages` would do it for a system Python, but not when PYTHON itself lives in a virtual environment: the new
    environment would then see the packages of the Python behind both.
    """
    if Path(sys.prefix).resolve() == venv.resolve():
        return can_import(python, "torch")
    if not can_import(Path(sys.executable), "torch"):
        return False
    folders = dict.fromkeys(path for path in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path) if path)
    lines = [folder for folder in folders if Path(folder).name in ("site-packages", "dist-packages")]
    (Path(site_packages(python)) / SHARED_PACKAGES).write_text("\n".join(lines) + "\n")
    tell(f"using the torch of {sys.executable}")
    return True


def site_packages(python: Path) -> str:
    """Return where an interpreter keeps its installed packages."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def can_import(python: Path, module: str) -> bool:
    """Say whether an interpreter finds a module, without loading it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], cwd="/", check=False).returncode == 0


def check_torch(python: Path) -> None:
    """Stop in words when the installed torch cannot be imported or is outside the supported range."""
    result = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False)
    if result.returncode:
        stop(f"torch was installed and cannot be imported:\n{result.stderr}")
    version = result.stdout.strip()
    if not TORCH_LOWEST <= tuple(int(part) for part in version.split(".")[:2]) < TORCH_BEYOND:
        stop(f"torch 2.11 to 2.14 is needed, and {python} has {version}. Name one: make TORCH_SPEC=torch==2.13.0 ...")
    tell(f"ready: Python {sys.version.split()[0]}, torch {version}")


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; stop with its own words when it fails."""
    tell("pip " + " ".join(arguments).replace(f"{ROOT}/", ""))
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments[:1], "--quiet", *arguments[1:]]
    if subprocess.run(command, check=False).returncode:
        stop("the installation failed; pip's message is above.")


def tell(line: str) -> None:
    """Say what is going on."""
    print(f"[bootstrap] {line}", flush=True)


def stop(line: str) -> None:
    """End with an error."""
    sys.exit(f"[bootstrap] error: {line}")


if __name__ == "__main__":
    main()
