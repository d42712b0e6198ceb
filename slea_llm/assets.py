"""Where recipes, prompts and data lie: at the top of the repository, or inside the package when it is a wheel."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from slea_llm.errors import ConfigError, nearest

AssetKind = Literal["recipes", "prompts", "data"]

ASSET_KINDS: tuple[str, ...] = get_args(AssetKind)


def roots(kind: AssetKind) -> tuple[Path, Path]:
    """The two places of a kind, in the order of search: the repository's top level, then the package's own copy."""
    package = Path(__file__).resolve().parent
    return package.parent / kind, package / "_assets" / kind


def names(kind: AssetKind) -> tuple[str, ...]:
    """Every file of a kind, as the names that `find` takes."""
    found = {
        path.relative_to(root).as_posix()
        for root in roots(kind)
        if root.is_dir()
        for path in root.rglob("*")
        if path.is_file()
    }
    return tuple(sorted(found))


def find(kind: AssetKind, name: str) -> Path:
    """The file of that name (relative, with `/`).

    Raises ConfigError for an unknown kind, for a name that points out of its folder, and for one that is not there.
    """
    if kind not in ASSET_KINDS:
        raise ConfigError(f"unknown asset kind {kind!r}; one of {', '.join(ASSET_KINDS)}{nearest(kind, ASSET_KINDS)}")
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts:
        raise ConfigError(f"asset name {name!r} must be a relative path inside {kind}/")
    for root in roots(kind):
        path = root / relative
        if path.is_file():
            return path
    raise ConfigError(f"there is no {name!r} in {kind}/{nearest(name, names(kind))}")
