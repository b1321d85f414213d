"""The checkpoints of one run in one folder: begin, commit, find the latest whole one, delete the oldest."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from coterie.checkpoint.durable import check_free_space, remove_folder, settle, storage_errors
from coterie.checkpoint.manifest import NewerFormatError
from coterie.checkpoint.names import PARTIAL, REPLACED, STEP_NAME, saved_steps, step_name
from coterie.checkpoint.reading import Checkpoint, open_checkpoint, read_manifest
from coterie.checkpoint.shard_file import Shapes
from coterie.checkpoint.writing import CheckpointWriter
from coterie.errors import CheckpointError, UsageError
from coterie.ids import RunId
from coterie.logs import get_logger

_FLOAT_BYTES = 4

_log = get_logger(__name__)


class CheckpointStore:
    """Checkpoints as `step-000120/` folders of one file per unit and a manifest.

    At every moment, a power failure included, the newest committed checkpoint is whole: a new one is written beside it
    as `step-000130.partial/`, put onto the disk, renamed, and only then are old ones deleted. One writer at a time.

    Args:
        folder: Made at the first `begin`.
        run_id: If given, checkpoints of another run in `folder` are refused.
        keep: How many whole checkpoints stay; at least two, since the newest may turn out to be damaged.
    """

    def __init__(self, folder: Path, *, run_id: RunId | None = None, keep: int = 2) -> None:
        if keep < 2:
            raise UsageError(
                f"{keep} checkpoint cannot be enough: a damaged one needs one before it", hint="keep 2 or more"
            )
        self.folder = folder
        self._run_id = run_id
        self._keep = keep
        self._damaged: dict[int, str] = {}

    @property
    def damage(self) -> dict[int, str]:
        """Steps whose checkpoint `latest` found damaged, and what is wrong with each."""
        return dict(self._damaged)

    def steps(self) -> tuple[int, ...]:
        """Steps that have a checkpoint folder, in order, whether whole or damaged. Changes nothing on the disk."""
        return saved_steps(self.folder)

    def begin(self, step: int, units: Mapping[int, Shapes], *, needed_bytes: int | None = None) -> CheckpointWriter:
        """Start the checkpoint of `step`: delete what a crash left behind, check that there is room.

        Args:
            step: Optimizer steps done.
            units: Per unit that must be written, its parameters' shapes: the trained ones, or all of them.
            needed_bytes: Room to ask for; by default that of the newest checkpoint, at least of the parameters.

        Raises:
            StorageError: Too little room is free, or the folder cannot be written.
            CheckpointError: The folder holds another run's checkpoints, or those of a newer version of this program.
        """
        with storage_errors(self.folder, needed_bytes or 0):
            self.folder.mkdir(parents=True, exist_ok=True)
            settle(self.folder, STEP_NAME)
            self._refuse_other_runs()
            if needed_bytes is None:
                needed_bytes = self._likely_bytes(units)
            check_free_space(self.folder, needed_bytes)
            partial = self.folder / f"{step_name(step)}{PARTIAL}"
            partial.mkdir()
        return CheckpointWriter(partial, step=step, units=units, needed_bytes=needed_bytes, committed=self._prune)

    def open(self, step: int, *, verify: bool = True) -> Checkpoint:
        """The checkpoint of `step`.

        Raises:
            CheckpointError: It is absent, damaged, of another run, or of a newer format.
        """
        return self._of_this_run(self._whole(step, verify=verify))

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are skipped, logged, and listed in `damage`.

        Raises:
            CheckpointError: There are checkpoints but every one is damaged, or they belong to another run, or a newer
                version of this program wrote the newest.
        """
        self._damaged.clear()
        for step in reversed(self.steps()):
            try:
                checkpoint = self._whole(step, verify=True)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self._damaged[step] = error.message
                _log.warning("skipped the damaged checkpoint of step %d: %s", step, error.message)
                continue
            return self._of_this_run(checkpoint)
        if self._damaged:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: " + "; ".join(self._damaged.values()),
                hint="restore the folder from a copy, or start the run anew in another folder",
            )
        return None

    def _whole(self, step: int, *, verify: bool) -> Checkpoint:
        checkpoint = open_checkpoint(self._path(step), verify=verify)
        if checkpoint.step != step:
            raise CheckpointError(f"{self._path(step).name} holds step {checkpoint.step}: the folder was renamed")
        return checkpoint

    def _of_this_run(self, checkpoint: Checkpoint) -> Checkpoint:
        run_id = checkpoint.manifest.terms.run_id
        if self._run_id is not None and run_id != self._run_id:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of run {run_id}, not of run {self._run_id}",
                hint="resume that run, or give this one a folder of its own",
            )
        return checkpoint

    def _refuse_other_runs(self) -> None:
        """Before writing: a folder with whole checkpoints of another run or a newer format is not ours to prune."""
        for step in self.steps():
            try:
                checkpoint = self._whole(step, verify=False)
            except NewerFormatError:
                raise
            except CheckpointError:
                continue
            self._of_this_run(checkpoint)

    def _path(self, step: int) -> Path:
        """Where the checkpoint of `step` is: a crash may have left it under the name it had to step aside to."""
        path = self.folder / step_name(step)
        aside = self.folder / f"{step_name(step)}{REPLACED}"
        return aside if aside.exists() and not path.exists() else path

    def _likely_bytes(self, units: Mapping[int, Shapes]) -> int:
        """What a checkpoint will take: as much as the newest, and the float32 parameters alone at least."""
        least = sum(_FLOAT_BYTES * prod(shape) for shapes in units.values() for shape in shapes.values())
        for step in reversed(self.steps()):
            try:
                return max(least, read_manifest(self._path(step)).nbytes)
            except CheckpointError:
                continue
        return least

    def _prune(self, committed: Checkpoint) -> None:
        """Delete damaged and older checkpoints, keeping the newest whole ones and the one just committed.

        Sizes are checked, not hashes. What belongs to another run or a newer program is left alone.
        """
        self._damaged.pop(committed.step, None)
        kept = 1
        for step in reversed(self.steps()):
            if step == committed.step:
                continue
            try:
                checkpoint = self._whole(step, verify=False)
            except NewerFormatError:
                continue
            except CheckpointError:
                remove_folder(self._path(step))
                continue
            if checkpoint.manifest.terms.run_id != committed.manifest.terms.run_id:
                continue
            if step not in self._damaged and kept < self._keep:
                kept += 1
            else:
                remove_folder(self._path(step))
