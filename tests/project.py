"""The files of the project: those under version control, or in an unpacked sdist all that are not generated."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
_GENERATED = {".venv", ".cache", ".hypothesis", "__pycache__", "build", "dist", "target", "PKG-INFO", "setup.cfg"}


def files() -> list[Path]:
    """Paths relative to ROOT."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [Path(name) for name in sorted(names) if name and (ROOT / name).is_file()]
    paths = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file()]
    return [path for path in paths if not any(_is_generated(part) for part in path.parts)]


def _is_generated(name: str) -> bool:
    return name in _GENERATED or name.endswith((".egg-info", "_cache"))
