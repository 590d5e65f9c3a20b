"""Profiles as files: one JSON per kind of hardware and link, such as `profiles/data/h200-nvlink.json`.

    profile = storage.find("H200", "nvlink")           # shipped, then overridden by files of the user's folders
    for line in storage.differences(profile, here):    # another GPU, NCCL or jax: say so
        logging.warning(line)
    storage.save(profile.with_section(measured), path)

`profile_json` describes the format. Files are untrusted data and are checked on reading. A file is read on demand, and
again only when it changes. A file is written as a whole or not at all.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dhelix.errors import DhelixError
from dhelix.profiles.estimates.alike import as_on, stand_in
from dhelix.profiles.files import codec
from dhelix.profiles.files.codec import ProfileFileError
from dhelix.profiles.files.profile_json import dumps, loads
from dhelix.profiles.hardware import LINKS, describe
from dhelix.profiles.keys import OperatorKey
from dhelix.profiles.profile import Profile, Provenance, Timing

__all__ = [
    "ProfileFileError",
    "differences",
    "dumps",
    "file_name",
    "find",
    "load",
    "loads",
    "of_hardware",
    "save",
    "shipped",
    "users_file",
]

SEARCH_PATH = "DHELIX_PROFILES"
"""Environment variable with folders of more profiles, separated as in PATH. Later folders override earlier ones."""
USERS_FOLDER = Path("~/.cache/dhelix/profiles")
"""Default folder for profiles, read by dhelix and written by `dhelix profile`; SEARCH_PATH replaces it."""

SHIPPED = Path(__file__).parents[1] / "data"


def file_name(hardware: str, link: str) -> str:
    return f"{hardware}-{link}.json".lower()


def shipped() -> tuple[str, ...]:
    """Names of the profiles that dhelix ships, such as `h200-nvlink`."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find(hardware: str, link: str, extra: Sequence[Path] = ()) -> Profile | None:
    """Everything known about this hardware and link, or None.

    The search reads the shipped file, then the file of the same name in each folder of DHELIX_PROFILES and of `extra`,
    then the files in `extra`. Later files override entry by entry (`Profile.merged`). `Profile.elsewhere` gets the
    operators known for the hardware over other links. A similar GPU's profile fills the gaps; `Profile.alike` names
    that GPU.

    Raises:
      ProfileFileError: a file cannot be read, or its hardware or link is not the wanted one.
      DhelixError: a requested folder or file does not exist.
    """
    files = (path for place in (SHIPPED, *_search_path(), *extra) for path in _files_of(place))
    return _find(hardware, link, tuple(extra), tuple(map(_state, files)))


def _files_of(place: Path) -> list[Path]:
    return sorted(place.glob("*.json")) if place.is_dir() else [place]


def _state(path: Path) -> tuple[Path, int, int]:
    """A path's time and size, which change with the file. Both are 0 if there is no file or only a dangling link."""
    try:
        status = path.stat()
    except OSError:
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=8)
def _find(hardware: str, link: str, extra: Sequence[Path], _states: object) -> Profile | None:
    """`find`, cached by `_states`, the states of all files that it may read."""
    profile = _over_one_link(hardware, link, extra)
    like = describe(hardware, link).like
    other = find(like, link) if like else None
    if profile is None and other is None:
        return None
    own = replace(profile or Profile(hardware, link), elsewhere=_operators_elsewhere(hardware, link))
    return own if other is None else stand_in(own, as_on(other, hardware))


def _operators_elsewhere(hardware: str, link: str) -> dict[OperatorKey, Timing]:
    """Operators of the same hardware over other links."""
    found: dict[OperatorKey, Timing] = {}
    for other in (other for other in LINKS if other != link.lower()):
        try:
            profile = _over_one_link(hardware, other, ())
        except DhelixError:  # reported when that link itself is used
            continue
        for section in profile.sections.values() if profile else ():
            found = {**section.operators, **found}
    return found


def _over_one_link(hardware: str, link: str, extra: Sequence[Path]) -> Profile | None:
    name = file_name(hardware, link)
    optional = [folder / name for folder in (SHIPPED, *_search_path())]
    optional += [folder / name for folder in extra if folder.is_dir()]
    wanted = [path for path in extra if not path.is_dir()]
    profile = None
    for path in (*(path for path in optional if path.exists()), *wanted):
        later = load(path)
        if (later.hardware.lower(), later.link.lower()) != (hardware.lower(), link.lower()):
            raise ProfileFileError(
                f"{path}: measured on {later.hardware} with link {later.link}, not on {hardware} with link {link}: "
                "remove this file, or name it after its own hardware and link"
            )
        profile = later if profile is None else profile.merged(later)
    return profile


def _search_path() -> list[Path]:
    folders = [Path(part) for part in os.environ.get(SEARCH_PATH, "").split(os.pathsep) if part]
    if not folders:
        return [USERS_FOLDER.expanduser()]
    for folder in folders:
        if not folder.is_dir():
            raise DhelixError(f"{SEARCH_PATH} names {folder}, which is not a folder: correct or unset it")
    return folders


def of_hardware(path: Path, hardware: str, link: str, name: str) -> Profile | None:
    """The profile in `path`; None if there is no such file.

    Raises:
      ProfileFileError: it is of other hardware or another link. The message asks for another file as `name`.
    """
    if not path.exists():
        return None
    found = load(path)
    if (found.hardware, found.link) != (hardware, link):
        raise ProfileFileError(
            f"{path} holds a profile of {found.hardware} with link {found.link}, but this one is for {hardware} with "
            f"link {link}; give another file as {name}"
        )
    return found


def users_file(hardware: str, link: str) -> Path:
    """The file with the user's own measurements: in the last folder of DHELIX_PROFILES, or in USERS_FOLDER."""
    return _search_path()[-1] / file_name(hardware, link)


def load(path: Path | str) -> Profile:
    """The profile in a file; read again only when the file has changed.

    Raises:
      ProfileFileError: there is no such file, it cannot be read, or it is no sound profile.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProfileFileError(f"{path}: not a file: check the path")
        if status.st_size > codec.MAX_BYTES:
            raise ProfileFileError(f"{path}: {status.st_size >> 20} MiB are too large for a profile: check the path")
        return _read(path.absolute(), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ProfileFileError(f"{path}: cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise ProfileFileError(f"{path}: not text, so not a profile: check the path") from None


@functools.lru_cache(maxsize=64)
def _read(path: Path, _mtime_ns: int, _size: int) -> Profile:
    return loads(path.read_text(encoding="utf-8"), str(path))


def save(profile: Profile, path: Path | str) -> None:
    """Writes a file as a whole or not at all. After an interruption, or to a concurrent reader, the old file is intact.

    Raises:
      ProfileFileError: `loads` would reject the profile.
      DhelixError: the file cannot be written.
    """
    path = Path(path)
    text = dumps(profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_file(path, text)
    except OSError as error:
        raise DhelixError(f"{path}: cannot be written ({error.strerror}): choose another place") from error


def _replace_file(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp lets only the owner read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def differences(profile: Profile, here: Provenance) -> tuple[str, ...]:
    """How this machine and its software differ from the profile's, one line per difference, to be shown as warnings.

    Compares the kind of GPU, NCCL's major and minor version, and the major versions of CUDA and jax (0.11 and 0.12
    count as different). A value that either side does not know is no difference. All measurements of a merged profile
    are compared.
    """
    compared = (
        ("GPU", "gpu", _gpu_kind, "all of its times may differ here"),
        ("NCCL", "nccl", lambda v: _version(v, 2), "times of collectives may differ here"),
        ("CUDA", "cuda", lambda v: _version(v, 1), "other kernels may be chosen here"),
        ("jax", "jax", _major, "XLA may compile other operators here"),
    )
    lines = []
    for name, attribute, essence, consequence in compared:
        ours = getattr(here, attribute)
        theirs = {getattr(p, attribute) for p in profile.measured_on}
        other = sorted(v for v in theirs if v and ours and essence(v) != essence(ours))
        if other:
            where = f"profile {profile.hardware} {profile.link}"
            lines.append(
                f"{where} was measured with {name} {', '.join(other)}, not {ours}: {consequence}; run `dhelix profile`"
            )
    return tuple(lines)


def _gpu_kind(name: str) -> str:
    return name.lower().removeprefix("nvidia").strip()


def _version(version: str, parts: int) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", version)[:parts])


def _major(version: str) -> tuple[str, ...]:
    return _version(version, 2 if version.startswith("0.") else 1)
