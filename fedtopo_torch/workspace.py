"""A new workspace: the folders algorithms/, datasets/ and runs/ that the command line looks in.

What they start with is package data, ``workspace_template/``.
"""

from __future__ import annotations

from pathlib import Path

from .options import OptionError

__all__ = ["FOLDERS", "TEMPLATE", "new_workspace"]

#: What a workspace consists of.
FOLDERS = ("algorithms", "datasets", "runs")

#: The folder whose content a new workspace gets.
TEMPLATE = Path(__file__).with_name("workspace_template")


def new_workspace(path: Path) -> list[Path]:
    """Make algorithms/, datasets/ and runs/ in a folder, each with its README and example.

    Args:
        path: the folder, made if there is none; other things in it are left alone.

    Returns:
        The files written, sorted.

    Raises:
        OptionError: ``path`` is a file, or one of the three is there already and is not an empty
            folder. Nothing is written then.
    """
    path = path.expanduser()
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file: a workspace needs a folder.")
    taken = [folder for folder in FOLDERS if _taken(path / folder)]
    if taken:
        raise OptionError(
            f"{path} already has {' and '.join(taken)}, and nothing is overwritten: choose another "
            f"folder, or move that away."
        )
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        # pip compiles what is Python, templates too.
        if source.is_file() and "__pycache__" not in source.parts:
            target = path / source.relative_to(TEMPLATE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            written.append(target)
    return written


def _taken(place: Path) -> bool:
    return place.exists() and not (place.is_dir() and not any(place.iterdir()))
