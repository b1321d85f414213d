"""Real data that ships with the package, small enough to try everything with; each folder states origin and licence."""

from pathlib import Path

from coterie.errors import DataError


def sample_path(name: str) -> Path:
    """The folder of a sample data set, with its README, LICENSE, and one file per split.

    Raises:
        DataError: No sample has this name.
    """
    root = Path(__file__).parent
    names = sorted(folder.name for folder in root.iterdir() if (folder / "LICENSE").is_file())
    if name not in names:
        raise DataError(f"no sample data set is called {name!r}", hint=f"the samples are: {', '.join(names)}")
    return root / name
