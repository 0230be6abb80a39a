"""Where the data folders are: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent
_FOLDERS = {"templates": "templates", "cache_db": "cache_db", "profiles": "autotune/profiles"}


def data(name: str) -> Path:
    """The folder of "templates", "cache_db" or "profiles". Raises FileNotFoundError naming both places."""
    packaged = _PACKAGE / "_data" / name
    checkout = _CHECKOUT / _FOLDERS[name]
    for folder in (packaged, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"pagegen's {name} folder is neither at {packaged} nor at {checkout}: reinstall pagegen-attention"
    )
