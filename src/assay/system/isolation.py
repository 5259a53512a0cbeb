"""Linux mechanisms that confine a process: namespaces, Landlock, resource limits, seccomp (a filter of system calls).

Everything goes through ctypes, so nothing has to be installed. On other systems these functions raise OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    """Return the result of a C function; raise OSError if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


@contextmanager
def refusal_noted(missing: list[str], protection: str) -> Iterator[None]:
    """Add the protection to a list if the system refuses it."""
    try:
        yield
    except OSError as error:
        missing.append(f"{protection} ({error.strerror or error})")


def prctl(option: int, value: int) -> None:
    checked(libc().prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))), "prctl")


def die_with_parent(signum: int) -> None:
    """Let this process receive a signal when the thread that started it ends."""
    with suppress(OSError):
        prctl(_SET_DEATH_SIGNAL, signum)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process."""
    with suppress(OSError):
        prctl(_SET_SUBREAPER, 1)


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


def limit_processes(maximum: int) -> None:
    """In the first process of a PID namespace: limit its processes, even if they run as root (Linux 6.14 and later)."""
    version = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if version >= (6, 14):  # in earlier versions the value applies to the whole machine
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(maximum))


def drop_capabilities() -> None:
    """Drop the capabilities of the first process of a user namespace."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    checked(libc().capset(header, none), "capset")


def restrict_files(readable: Iterable[str], listable: Iterable[str] = ()) -> None:
    """Restrict opening of files to these and to those below these folders (Landlock), and writing to /dev/null.

    Folders in `listable`, and those below them, can be listed; files in them cannot be read.
    """
    version = checked(libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "Landlock")
    handled = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    network, scoped = 3 if version >= 4 else 0, 3 if version >= 6 else 0  # TCP; signals and abstract sockets
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = checked(libc().syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock")
    try:
        for rights, paths in ((_READ_FILE, readable), (_READ_FILE | _WRITE_FILE, ["/dev/null"]), (_READ_DIR, listable)):
            for path in paths:
                _allow(ruleset, path, rights)
        prctl(_SET_NO_NEW_PRIVS, 1)
        checked(libc().syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # it does not exist
    try:
        rule = struct.pack("=Qi", rights | (_READ_DIR if os.path.isdir(path) else 0), descriptor)
        checked(libc().syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock: {path}")
    finally:
        os.close(descriptor)


def import_folders(user_code: bool) -> list[str]:
    """Return what must stay readable so that modules can be imported; with `user_code`, from all of `sys.path`."""
    paths = sysconfig.get_paths()
    standard = [paths["stdlib"], paths["platstdlib"]]
    packages = [folder for folder in sys.path if user_code or _holds_packages(Path(folder))]
    ours = str(Path(__file__).resolve().parents[1])
    libraries = [str(Path(prefix, "lib")) for prefix in (sys.prefix, sys.base_prefix)]
    libraries += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [path for path in (*standard, *packages, ours, *libraries, *LIBRARIES, *TIME_ZONES) if path]


def standard_library() -> tuple[list[str], list[str]]:
    """Return what must be readable, and listable, to import the standard library, but no installed package."""
    paths = sysconfig.get_paths()
    standard = [paths["stdlib"], paths["platstdlib"]]
    libraries = [str(Path(sys.base_prefix, "lib")), *os.environ.get("LD_LIBRARY_PATH", "").split(":"), *LIBRARIES]
    readable: list[str] = []
    for folder in dict.fromkeys((*standard, *filter(None, libraries))):
        if not os.path.isdir(folder):
            readable.append(folder)
            continue
        with suppress(OSError):
            readable += [entry.path for entry in os.scandir(folder) if not _PACKAGES.match(entry.name)]
    return [*readable, *TIME_ZONES], standard


_PACKAGES = re.compile(r"python|pypy|site-packages|dist-packages")  # also the folders that contain these


def _holds_packages(folder: Path) -> bool:
    """Return whether packages are installed in this folder, e.g. by `pip install --target`."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def limit(resource_name: str, value: int) -> None:
    """Lower a resource limit, e.g. RLIMIT_CORE, if the system has and allows it."""
    import resource

    kind = getattr(resource, resource_name, None)
    if kind is None:
        return
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, hard if resource_name in _RAISABLE else value))


_RAISABLE = ("RLIMIT_AS", "RLIMIT_CPU")  # may be raised again: for more items, or by users' functions


def tasks_on_system() -> int:
    """Return the number of processes and threads on the whole machine."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 4096


_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF operations
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SET_SECCOMP, _FILTER = 22, 2

# machine -> audit number, column in the table below
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Numbers of system calls on x86_64 and aarch64; -1: the machine has no call of that name.
_CALLS = {
    "socket": (41, 198),
    **{"fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "clone": (56, 220)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "prlimit64": (302, 261)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    **{"sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239), "fcntl": (72, 25), "ioctl": (16, 29)},
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"shmat": (30, 196), "semop": (65, 193), "semtimedop": (220, 192), "msgsnd": (69, 189), "msgrcv": (70, 188)},
    **{"shmctl": (31, 195), "semctl": (66, 191), "msgctl": (71, 187)},
    **{"open": (2, -1), "openat": (257, 56), "creat": (85, -1), "truncate": (76, 45), "open_by_handle_at": (304, 265)},
    **{"rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, -1), "unlinkat": (263, 35)},
    **{"mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "link": (86, -1), "linkat": (265, 37)},
    **{"symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1), "mknodat": (259, 33)},
    **{"chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53)},
    **{"chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54)},
    **{"utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"inotify_init": (253, -1), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "acct": (163, 89)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "syslog": (103, 116)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266)},
    **{"sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, -1), "ioperm": (173, -1)},
    **{"pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fspick": (433, 433)},
    **{"clone3": (435, 435), "openat2": (437, 437), "process_madvise": (440, 440), "mount_setattr": (442, 442)},
    **{"process_mrelease": (448, 448), "fchmodat2": (452, 452), "setxattrat": (463, 463), "removexattrat": (466, 466)},
    **{"open_tree_attr": (467, 467), "file_setattr": (469, 469)},
}
_CONDITIONAL = ("clone", "kill", "tgkill", "prlimit64", "open", "openat", "fcntl", "ioctl")
# Commands that choose the process to which the kernel sends a signal, which may be SIGKILL, when a descriptor is ready.
_SET_OWNER = {"fcntl": (8, 15), "ioctl": (0x8901, 0x8902)}  # F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP
# A filter cannot read the arguments of these, which lie in memory. After ENOSYS, libc uses the older calls.
_UNKNOWN = ("clone3", "openat2")
STRICT = tuple(name for name in _CALLS if name not in _CONDITIONAL)


def filter_system_calls(read_only: bool) -> None:
    """Refuse sockets, new processes, acting on other processes, changes to files, and system administration.

    Refused system calls fail with an error code. Threads, reading files and all operations on open descriptors still
    work. With `read_only`, files cannot be opened for writing either.
    """
    threads_only = _conditional("clone", 0, [_step(_ANY_BIT, _CLONE_THREAD, 1, 0)])
    install_filter(_refusals(STRICT) + threads_only + _own_process_only(os.getpid(), read_only))


def forking_filter() -> list[bytes]:
    """Return a filter like `filter_system_calls`, for a process that forks children and ends them."""
    return _refusals(tuple(name for name in STRICT if name not in ("fork", "vfork")))


def forked_filter(read_only: bool) -> list[bytes]:
    """Return what the children of a process with `forking_filter` need in addition; it refuses threads too.

    A child may send signals to its process group only.
    """
    return _refusals(("fork", "vfork", "clone")) + _own_process_only(0, read_only)


def _own_process_only(pid: int, read_only: bool) -> list[bytes]:
    rules = _conditional("kill", 0, [_step(_EQUAL, pid, 1, 0)])
    rules += _conditional("tgkill", 0, [_step(_EQUAL, pid, 1, 0)])
    rules += _conditional("prlimit64", 0, [_step(_EQUAL, 0, 2, 0), _step(_EQUAL, pid, 1, 0)])
    for name, (first, second) in _SET_OWNER.items():
        rules += _conditional(name, 1, [_step(_EQUAL, first, 1, 0), _step(_EQUAL, second, 0, 1)])
    if read_only:
        for name, argument in (("openat", 2), ("open", 1)):
            rules += _conditional(name, argument, [_step(_ANY_BIT, _WRITING, 0, 1)], errno.EACCES)
    return rules


def _machine() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(f"no seccomp filter for {machine}")
    return _MACHINES[machine]


def _refusals(names: tuple[str, ...]) -> list[bytes]:
    rules = []
    for name in names:
        code = errno.ENOSYS if name in _UNKNOWN else errno.EACCES if name == "socket" else errno.EPERM
        rules += _for_call(name, [_refused(code)])
    return rules


def _conditional(name: str, argument: int, tests: list[bytes], code: int = errno.EPERM) -> list[bytes]:
    """Refuse a call depending on an argument: the tests end at the refusal, or jump over it."""
    load = _step(_LOAD, _ARGUMENTS + 8 * argument)  # the lower half: both machines are little-endian
    return _for_call(name, [load, *tests, _refused(code), _step(_RETURN, _ALLOW)])


def _for_call(name: str, steps: list[bytes]) -> list[bytes]:
    """Apply steps to one system call, skip them for others; the accumulator holds the call number before and after."""
    number = _CALLS[name][_machine()[1]]
    return [_step(_EQUAL, number, 0, len(steps)), *steps] if number >= 0 else []


def _refused(code: int = errno.EPERM) -> bytes:
    return _step(_RETURN, _ERRNO | code)


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def install_filter(rules: list[bytes]) -> None:
    audit, _ = _machine()
    prologue = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, audit, 1, 0), _refused(), _step(_LOAD, _NUMBER)]
    if platform.machine() == "x86_64":
        prologue += [_step(_GREATER_EQUAL, _X32, 0, 1), _refused(errno.ENOSYS)]
    program = b"".join([*prologue, *rules, _step(_RETURN, _ALLOW)])
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    prctl(_SET_NO_NEW_PRIVS, 1)
    checked(libc().prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), header, 0, 0), "seccomp")
