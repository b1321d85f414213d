"""Where this user's settings of coterie are kept. Loads nothing: the command line asks at every start."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

IN_MEMORY = "memory"
"""In place of a file: a key that lives as long as the process, for workers that a run starts by itself."""

IDENTITY_VARIABLE = "COTERIE_IDENTITY"
"""Overrides where the key is kept."""


def config_folder(environment: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """Where this user's settings of coterie are kept: `COTERIE_CONFIG`, else the platform's own place for them."""
    known = os.environ if environment is None else environment
    if chosen := known.get("COTERIE_CONFIG"):
        return Path(chosen)
    if platform == "win32":
        roaming = known.get("APPDATA")
        return (Path(roaming) if roaming else Path.home() / "AppData" / "Roaming") / "coterie"
    if platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "coterie"
    xdg = known.get("XDG_CONFIG_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".config") / "coterie"
