"""Whether another user may have written files that are run or trusted, such as compiled kernels and measurements in a
cache. Like ssh with its own files, only files that nobody but this user and root can write are trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.boundary.files import AnyPath, shown


def distrust(path: AnyPath) -> str:
    """Why another user may have written `path`: a sentence without its full stop; empty if no other user can have. A
    path that does not exist yet is judged by the folders above it, up to this user's home."""
    whole, home = Path(os.path.abspath(path)), os.path.expanduser("~")
    for way in dict.fromkeys((whole, Path(os.path.realpath(whole)))):
        for part in (way, *way.parents):
            try:
                states = os.lstat(part), os.stat(part)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for state in states:
                if state.st_uid not in (0, os.geteuid()):
                    return f"{shown(part)} belongs to {_name(state.st_uid)}"
            # In a folder with the sticky bit, such as /tmp, nobody can replace a file that somebody else owns.
            sticky = part != way and state.st_mode & stat.S_ISVTX
            if _others_write(state) and not sticky:
                return f"other users may write {shown(part)} (`chmod go-w {shown(part)}` forbids it)"
            if str(part) == home:
                break
    return ""


def _others_write(state: os.stat_result) -> bool:
    if state.st_mode & stat.S_IWOTH:
        return True
    return bool(state.st_mode & stat.S_IWGRP) and not _is_private(state.st_gid, _name(state.st_uid))


def _is_private(gid: int, user: str) -> bool:
    """Whether a group is a user's own, as many systems give each user one."""
    import grp  # late: a browser's Python has neither groups nor users

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _name(uid: int) -> str:
    import pwd  # late: as grp

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
