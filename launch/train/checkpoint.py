"""Checkpoints of a training run: the state, and the run's configuration as JSON.

Orbax writes a step to a temporary folder and renames the folder when it is complete. So a resume never takes an
interrupted save for a checkpoint. Before it reads arrays, `restore` compares what the checkpoint holds with what the
run expects.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dhelix.errors import DhelixError

Config = Mapping[str, Any]
"""JSON values by name; nested mappings are compared entry by entry."""


class CheckpointError(DhelixError):
    """A checkpoint cannot be written or read, or belongs to another model."""


class Checkpoints:
    """The checkpoints of one run in one folder. Use it as a context manager: leaving it waits for pending writes.

    Args:
      folder: created if it does not exist.
      config: configuration of the run. A checkpoint with another configuration is refused.
      keep: how many of the newest checkpoints to keep.
      notes: JSON values that are stored with the configuration and not compared.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Config, keep: int = 3, notes: Config | None = None):
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file; give --checkpoint_dir a folder")
        self._config = _plain({"config": config, "notes": notes or {}})
        logging.getLogger("absl").addFilter(_is_not_orbax)  # Orbax also raises what its threads log
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                item_handlers={"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            )
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.folder} ({_first_line(error)}); give another --checkpoint_dir"
            ) from None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for pending writes. After a CheckpointError, further errors are suppressed."""
        failed = kind is not None and issubclass(kind, CheckpointError)
        with contextlib.suppress(Exception) if failed else self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of a write, also of an earlier one in the background, into CheckpointError."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # Orbax passes on the file system library's errors
            full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
            why = "no space is left on the disk; free some" if full else _first_line(error)[:200]
            raise CheckpointError(f"no checkpoint can be written to {self.folder} ({why}); {self.newest()}") from None

    def newest(self) -> str:
        """Says which checkpoint is the newest complete one. An incomplete one has another kind of name."""
        whole = [int(path.name) for path in self.folder.glob("*") if path.name.isdecimal()]
        if not whole:
            return f"there is no complete checkpoint in {self.folder}"
        return f"--resume continues from step {max(whole)}, the newest checkpoint there"

    @property
    def latest_step(self) -> int | None:
        """Number of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Copies `state` off the devices and writes it in the background."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(self._config))
        with self._writing():
            self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Waits until all saves are on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def notes(self, step: int) -> Config:
        """The notes that were stored with the checkpoint of `step`."""
        return self._run(step)["notes"]

    def restore(self, abstract_state: Any) -> tuple[int, Any]:
        """Reads the newest checkpoint.

        Args:
          abstract_state: `jax.ShapeDtypeStruct`s with shardings, which may differ from those of the save.

        Returns:
          The checkpoint's step, and its state laid out as `abstract_state`.

        Raises:
          CheckpointError: there is no checkpoint, it is damaged, its configuration differs, or its arrays have other
            names, shapes or types. The message names the first entry that differs.
        """
        step = self.latest_step
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.folder}; leave out --resume to start a new run")
        where = f"the checkpoint of step {step} in {self.folder}"
        _compare(where, self._run(step)["config"], self._config["config"])
        try:
            metadata = self._manager.item_metadata(step)["state"]
            stored = {} if metadata is None else _arrays(getattr(metadata, "tree", metadata))
            _compare(where, stored, _arrays(abstract_state))
            state = ocp.args.StandardRestore(abstract_state)
            return step, self._manager.restore(step, args=ocp.args.Composite(state=state))["state"]
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            older = [other for other in self._manager.all_steps() if other < step]
            others = f", the newest of which is of step {max(older)}" if older else ""
            raise CheckpointError(
                f"{where} is damaged ({_first_line(error)[:200]}); delete its folder to continue from an earlier "
                f"one{others}"
            ) from error

    def _run(self, step: int) -> dict[str, Any]:
        restore = ocp.args.Composite(run=ocp.args.JsonRestore())
        try:
            return self._manager.restore(step, args=restore)["run"]
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / str(step)} was not written by `dhelix train` ({_first_line(error)}); "
                "give another --checkpoint_dir"
            ) from error


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _arrays(tree: Any) -> dict[str, str]:
    """Shape and type of each array by its path: `params.layers.wq` -> `float32[4,128,8,16]`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_path(path): _describe(leaf) for path, leaf in leaves if hasattr(leaf, "shape")}


def _path(path: tuple[Any, ...]) -> str:
    names = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))) for key in path)
    return ".".join(str(name) for name in names)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _compare(where: str, stored: Config, expected: Config) -> None:
    stored, expected = _flat(stored), _flat(expected)
    for name in [*expected, *(name for name in stored if name not in expected)]:
        there, here = stored.get(name, "absent"), expected.get(name, "absent")
        if there != here:
            raise CheckpointError(
                f"{where} belongs to another model: its {name} is {there}, and this run's is {here}; give the options "
                "it was written with, or another --checkpoint_dir"
            )


def _flat(config: Config, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _plain(config: Config) -> dict[str, Any]:
    """The configuration as JSON returns it: tuples become lists."""
    return json.loads(json.dumps(config))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
