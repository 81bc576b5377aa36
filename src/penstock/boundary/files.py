"""Files: the one place that opens paths named by a user or by another file for reading, and that turns system errors
into sentences.

A path may lead to a folder, a pipe that nobody writes to, an endless device, a link to nothing, or three gigabytes of
holes. So the path is checked before it is opened, only regular files are read, and never more than the caller can use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from penstock.errors import DataError, EnvironmentProblem, PenstockError
from penstock.leftovers import replace_file

AnyPath = str | os.PathLike[str]

_CAUSES: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("it does not exist", "Check the path."),
    errno.EACCES: ("this user may not open it", "Change its permissions, or choose another path."),
    errno.EPERM: ("this user may not change it", "Change its permissions, or choose another path."),
    errno.EROFS: ("its file system is read-only", "Choose a path that can be written."),
    errno.ENOSPC: ("the disk is full", "Free space, or choose a path on another disk."),
    errno.EDQUOT: ("this user's share of the disk is full", "Free space, or choose a path on another disk."),
    errno.EFBIG: ("it would be larger than a file may be here", "Raise `ulimit -f`, or choose another disk."),
    errno.ENAMETOOLONG: ("its name is too long", "Choose a shorter one."),
    errno.EISDIR: ("it is a folder", "Give the path of a file."),
    errno.ENOTDIR: ("a part of its path is a file, not a folder", "Check the path."),
    errno.EEXIST: ("it exists already", "Remove it, or choose another path."),
    errno.ENOTEMPTY: ("the folder is not empty", "Remove it, or choose another path."),
    errno.ELOOP: ("it is a link that leads back to itself", "Mend the link."),
    errno.ENXIO: ("nothing is at its other end", "Give the path of a regular file."),
    errno.EMFILE: ("too many files are open", "Raise `ulimit -n`."),
    errno.ENFILE: ("too many files are open on this machine", "Close other programs."),
    errno.EIO: ("the disk fails", "Look into the system's log, and copy the data from elsewhere."),
    errno.ESTALE: ("the network's file system has lost it", "Mount it again."),
}
"""The cause of each error number, in a user's words, and what to do next."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Unreadable(Exception):
    """Why something from outside cannot be read: the end of a sentence. `remedy` is the next sentence."""

    remedy = "Check that it is the right file."


def open_regular(
    path: AnyPath, what: str, *, limit: int | None = None, error: type[PenstockError] = DataError, remedy: str = ""
) -> BinaryIO:  # fmt: skip
    """Open the regular file `path`, unbuffered, for reading. This never waits, as opening a pipe would.

    `what` begins the message, such as "The machine file". `limit` is in bytes; without one, the caller bounds what it
    reads. `remedy` is a sentence that replaces the usual one. Raises `error` where it cannot be read.
    """
    with _refusing(path, what, error, remedy):
        return _opened(path, limit)


def read_bytes(
    path: AnyPath, what: str, *, limit: int, error: type[PenstockError] = DataError, remedy: str = ""
) -> bytes:
    """The content of the regular file `path`, of at most `limit` bytes. Arguments and errors as for `open_regular`."""
    with _refusing(path, what, error, remedy):
        return content(path, limit=limit)


def content(path: AnyPath, *, limit: int) -> bytes:
    """Like `read_bytes`, but raises Unreadable, for callers that write the whole message themselves."""
    with _opened(path, limit) as file:
        try:
            # Some files, such as those of /proc, hold more than their size says.
            parts, left = [], limit + 1
            while left and (part := file.read(min(left, max(os.fstat(file.fileno()).st_size + 1, 1 << 16)))):
                parts.append(part)
                left -= len(part)
        except OSError as problem:
            raise _unreadable(problem, path) from problem
    if not left:
        raise Unreadable(f"it has more than {limit:,} bytes, which is the most that is read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_text(
    path: AnyPath, what: str, *, limit: int, error: type[PenstockError] = DataError, remedy: str = ""
) -> str:
    """Read text in UTF-8, with or without a byte order mark, as `read_bytes` reads bytes."""
    raw = read_bytes(path, what, limit=limit, error=error, remedy=remedy)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"{what} {shown(path)} is not text in UTF-8: byte {problem.start:,} is 0x{raw[problem.start]:02x}. "
            f"{remedy or 'Save it as UTF-8.'}"
        ) from problem


def visible_files(root: AnyPath) -> Iterator[str]:
    """Paths of all files in a folder and below it, except hidden files and hidden folders. Raises OSError for a folder
    that may not be listed."""
    # Not `Path.rglob`, which passes over such folders silently.
    for folder, folders, files in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name[0] != "."]
        yield from (os.path.join(folder, name) for name in files if name[0] != ".")


def _raise(problem: OSError) -> NoReturn:
    raise problem


def write_text(path: AnyPath, text: str) -> None:
    """Write a text in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a file, whole or not at all, and make its folder. Raises EnvironmentProblem with the path and a remedy."""
    file = Path(path)
    try:
        if file.parent.is_file():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():  # such as /dev/stdout
            file.write_bytes(data)
            return
        # A reader meanwhile sees either the old file or the new one.
        replace_file(Path(os.path.realpath(file)), lambda partial: partial.write_bytes(data))
    except OSError as problem:
        raise EnvironmentProblem(
            f"{shown(path)} cannot be written: {why(problem)}. {remedy_for(problem)}"
        ) from problem


def own_file(folder: AnyPath, name: str) -> Path:
    """The path of a file or folder that Penstock names itself in a folder of its own, such as a run's. Call it before
    each write. Raises EnvironmentProblem where a part of `name` is a link: writing would change another file.
    """
    path = Path(folder)
    for part in Path(name).parts:
        path /= part
        if path.is_symlink():
            raise EnvironmentProblem(
                f"{shown(path)} is a link to {shown(os.readlink(path))}, and writing there would change that file. "
                "Remove the link, or choose another folder."
            )
    return path


def require_folder(path: AnyPath) -> None:
    """Make a folder and check that files can be made in it, before hours of work whose results go there."""
    with naming(path):
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


@contextlib.contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Add the path to system errors raised inside that have none; errors of writing have none."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None and problem.errno is not None:
            problem.filename = os.fspath(path)
        raise


def explained(problem: OSError) -> EnvironmentProblem | None:
    """A system error about files and disks as a sentence with path and remedy; None for others, as of connections."""
    if problem.errno not in _CAUSES or isinstance(problem.filename, int):
        return None
    path = problem.filename
    subject = shown(os.fsdecode(path)) if path is not None else "Standard output or a file"
    return EnvironmentProblem(f"{subject} cannot be read or written: {why(problem)}. {remedy_for(problem)}")


def printable(text: str) -> str:
    """A message with its control characters spelled out, but for ends of lines and tabs: some come from outside."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text
    )


def why(problem: OSError, path: AnyPath | None = None) -> str:
    """The cause of a system error, as the end of a sentence."""
    path = path if path is not None else problem.filename
    if problem.errno == errno.ENOENT and path is not None and os.path.islink(path):
        return f"it is a link to {shown(os.readlink(path))}, which does not exist"
    cause = _CAUSES.get(problem.errno or 0)
    return cause[0] if cause else problem.strerror or str(problem) or type(problem).__name__


def remedy_for(problem: OSError) -> str:
    """The remedy for a system error: a sentence."""
    cause = _CAUSES.get(problem.errno or 0)
    return cause[1] if cause else "Check the path and the disk."


def quoted(value: object, longest: int = 80) -> str:
    """A value from outside as a message shows it: in quotes, with control characters and terminal escapes spelled out,
    and without its middle where it is long.
    """
    text = value if isinstance(value, str) else str(value)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} … {text[-half:]}"
    return repr(text)


def shown(path: AnyPath) -> str:
    """A path as it is, or in quotes where it has spaces or characters that a terminal would not show (see `quoted`)."""
    text = os.fspath(path)
    return text if text.isprintable() and 0 < len(text) <= 500 else quoted(text)


@contextlib.contextmanager
def _refusing(path: AnyPath, what: str, error: type[PenstockError], remedy: str) -> Iterator[None]:
    try:
        yield
    except Unreadable as problem:
        raise error(
            f"{what} {shown(path)} cannot be read: {problem}. {remedy or problem.remedy}"
        ) from problem


def _opened(path: AnyPath, limit: int | None) -> BinaryIO:
    try:
        # Checked before it is opened, because opening some devices has effects, and again after, because the path may
        # have changed.
        _refuse_others(os.stat(path))
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = _refuse_others(os.fstat(handle))
            if limit is not None and size > limit:
                raise Unreadable(f"it has {size:,} bytes, and at most {limit:,} are read")
        except BaseException:
            os.close(handle)
            raise
    except (OSError, ValueError) as problem:
        raise _unreadable(problem, path) from problem
    return open(handle, "rb", buffering=0)


def _refuse_others(status: os.stat_result) -> int:
    """The size of a regular file in bytes."""
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'special')}, not a regular file")
    return status.st_size


def _unreadable(problem: OSError | ValueError, path: AnyPath) -> Unreadable:
    if isinstance(problem, OSError):
        reason = Unreadable(why(problem, path))
        reason.remedy = remedy_for(problem)
        return reason
    return Unreadable(
        f"its name is impossible ({problem})"
    )  # os.stat's complaints about NUL and half characters
