"""Is a model's name a folder or file here, or a name on the hub? Decided before anything heavy is imported."""

from pathlib import Path

from coterie.errors import ModelError

GGUF = ".gguf"
"""Ending of llama.cpp's single-file models."""


def local_model(name: str) -> Path | None:
    """The Hugging Face folder or the GGUF file that `name` means; None if it is a name on the hub.

    A folder that holds one GGUF file and no `config.json` means that file.

    Raises:
        ModelError: It looks like a path, and no such folder or GGUF file is there, or there are several.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else _only_gguf(path) or path
    if path.is_file() and path.suffix == GGUF:
        return path
    if path.suffix == GGUF:
        raise ModelError(f"there is no GGUF file {name}", hint="check the spelling")
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"there is no model folder {name}", hint="give a folder that holds config.json and weights, or a GGUF file"
        )
    return None


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(path for path in folder.iterdir() if path.suffix == GGUF)
    if len(files) > 1:
        raise ModelError(
            f"{folder} holds {len(files)} GGUF files ({', '.join(path.name for path in files[:3])})",
            hint="give one of the files",
        )
    return files[0] if files else None
