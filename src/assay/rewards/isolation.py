"""What Linux offers to confine a process: namespaces, Landlock and resource limits; see `seccomp` for system calls.

Everything goes through ctypes, so nothing has to be installed. On other systems these functions raise OSError.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID_NODEV_NOEXEC, _RECURSIVE_SLAVE = 2 | 4 | 8, 0x4000 | 0x80000
_SET_DEATH_SIGNAL, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on all architectures
_WRITE_FILE, _READ_FILE, _READ_DIR = 2, 4, 8
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version of Landlock -> number of file access rights; later ones: 16
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/etc/ld.so.cache")
TIME_ZONES = ("/etc/localtime", "/usr/share/zoneinfo")


def libc() -> Any:
    if sys.platform != "linux":
        raise OSError("this system is not Linux")
    return ctypes.CDLL(None, use_errno=True)


def checked(result: int, name: str) -> int:
    """The result of a C function, or OSError where it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int) -> None:
    checked(libc().prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))), "prctl")


def die_with_parent(signum: int) -> None:
    """Receive this signal when the thread that started this process ends."""
    with suppress(OSError):
        prctl(_SET_DEATH_SIGNAL, signum)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    with suppress(OSError):
        prctl(_SET_SUBREAPER, 1)


def no_new_privileges() -> None:
    prctl(_SET_NO_NEW_PRIVS, 1)


def enter_namespaces(network: bool) -> None:
    """Give this process's children a PID and a mount namespace, and without `network` an empty network one."""
    flags = _NEWPID | _NEWNS | (0 if network else _NEWNET | _NEWIPC)
    if libc().unshare(flags) == 0:  # as root
        return
    user, group = os.geteuid(), os.getegid()
    checked(libc().unshare(flags | _NEWUSER), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(content)


def mount_own_proc() -> None:
    """In the first process of a PID namespace: let /proc show the processes of this namespace only."""
    checked(libc().mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE_SLAVE), None), "mount /")
    flags = ctypes.c_ulong(_NOSUID_NODEV_NOEXEC)
    checked(libc().mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")


def limit_processes(most: int) -> None:
    """In the first process of a PID namespace: at most so many processes in it, root's too (Linux 6.14 and later)."""
    version = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if version >= (6, 14):  # before that the value holds for the whole machine
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(most))


def drop_capabilities() -> None:
    """Give up what the first process of a user namespace may do in it."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    checked(libc().capset(header, none), "capset")


def restrict_files(readable: Iterable[str], writable: Iterable[str] = ("/dev/null",)) -> None:
    """From now on only these files, and those below these folders, can be opened (Landlock)."""
    version = checked(libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "Landlock")
    handled = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    network, scoped = 3 if version >= 4 else 0, 3 if version >= 6 else 0  # TCP; signals and abstract sockets
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = checked(libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock")
    try:
        for rights, paths in ((_READ_FILE, readable), (_READ_FILE | _WRITE_FILE, writable)):
            for path in paths:
                _allow(ruleset, path, rights)
        no_new_privileges()
        checked(libc().syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what does not exist needs no permission
    try:
        rule = struct.pack("=Qi", rights | (_READ_DIR if os.path.isdir(path) else 0), descriptor)
        checked(libc().syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock: {path}")
    finally:
        os.close(descriptor)


def import_folders(user_code: bool) -> list[str]:
    """What has to stay readable so that modules can still be imported. `user_code`: from all of `sys.path`."""
    paths = sysconfig.get_paths()
    standard = [paths["stdlib"], paths["platstdlib"]]
    packages = [place for place in sys.path if user_code or _holds_packages(Path(place))]
    ours = str(Path(__file__).resolve().parents[1])
    libraries = [str(Path(prefix, "lib")) for prefix in (sys.prefix, sys.base_prefix)]
    libraries += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [place for place in (*standard, *packages, ours, *libraries, *LIBRARIES, *TIME_ZONES) if place]


def _holds_packages(folder: Path) -> bool:
    """Whether packages are installed in this folder, e.g. by `pip install --target`; a project's folder has none."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def limit(resource_name: str, value: int) -> None:
    """Lower a resource limit, e.g. RLIMIT_CORE. Not every system has or allows each."""
    import resource

    kind = getattr(resource, resource_name, None)
    if kind is None:
        return
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, hard if resource_name in _RAISABLE else value))


_RAISABLE = ("RLIMIT_AS", "RLIMIT_CPU")  # raised again for more answers, or by users' functions that know what they do


def tasks_on_system() -> int:
    """Number of processes and threads on the whole machine."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 4096
