"""Is a model's name a folder here or a name on the hub? Decided before anything heavy is imported."""

from pathlib import Path

from coterie.errors import ModelError


def local_model_folder(name: str) -> Path | None:
    """The folder that `name` means; None if it is a name on the hub.

    Raises:
        ModelError: It looks like a path, and no such folder is there.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no model folder {name}", hint="give a folder that holds config.json and weights")
    return None
