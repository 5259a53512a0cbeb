"""A seccomp filter: no sockets, no new processes, no signals to others, no changes to files, no system administration.

Refused system calls fail with an error code. Threads, reading files and everything on open descriptors still work.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from assay.rewards.isolation import checked, libc, no_new_privileges

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF operations
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SET_SECCOMP, _FILTER = 22, 2

# machine -> audit number, and its column in the table below
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Numbers of system calls on x86_64 and aarch64; -1: it has none of that name.
_CALLS = {
    "socket": (41, 198),
    **{"fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "clone": (56, 220)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "prlimit64": (302, 261)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"open": (2, -1), "openat": (257, 56), "creat": (85, -1), "truncate": (76, 45), "open_by_handle_at": (304, 265)},
    **{"rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, -1), "unlinkat": (263, 35)},
    **{"mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "link": (86, -1), "linkat": (265, 37)},
    **{"symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1), "mknodat": (259, 33)},
    **{"chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53)},
    **{"chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54)},
    **{"utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
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
_CONDITIONAL = ("clone", "kill", "tgkill", "prlimit64", "open", "openat")
_UNKNOWN = ("clone3", "openat2")  # arguments in memory cannot be looked at; told ENOSYS, libc uses the older ones
STRICT = tuple(name for name in _CALLS if name not in _CONDITIONAL)


def confine(read_only: bool) -> None:
    """Install the filter of this module. `read_only`: files cannot be opened for writing either."""
    own = os.getpid()
    rules = _refusals(STRICT)
    rules += _unless_bit("clone", 0, _CLONE_THREAD)
    for name in ("kill", "tgkill"):
        rules += _unless_equal(name, (own,))
    rules += _unless_equal("prlimit64", (0, own))
    if read_only:
        rules += _if_bit("openat", 2, _WRITING) + _if_bit("open", 1, _WRITING)
    _install(rules)


def refuse(*names: str) -> None:
    """Install a filter that refuses just these system calls."""
    _install(_refusals(names))


def _machine() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(f"no seccomp filter for {machine}")
    return _MACHINES[machine]


def _number(name: str) -> int:
    return _CALLS[name][_machine()[1]]


def _refusals(names: tuple[str, ...]) -> list[bytes]:
    rules = []
    for name in names:
        code = errno.ENOSYS if name in _UNKNOWN else errno.EACCES if name == "socket" else errno.EPERM
        rules += _for_call(name, [_step(_RETURN, _ERRNO | code)])
    return rules


def _unless_bit(name: str, argument: int, bits: int) -> list[bytes]:
    return _for_call(name, [_argument(argument), _step(_ANY_BIT, bits, 1, 0), _refused(), _allowed()])


def _if_bit(name: str, argument: int, bits: int) -> list[bytes]:
    refused = _step(_RETURN, _ERRNO | errno.EACCES)
    return _for_call(name, [_argument(argument), _step(_ANY_BIT, bits, 0, 1), refused, _allowed()])


def _unless_equal(name: str, values: tuple[int, ...]) -> list[bytes]:
    compare = [_step(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return _for_call(name, [_argument(0), *compare, _refused(), _allowed()])


def _for_call(name: str, steps: list[bytes]) -> list[bytes]:
    """These steps if it is this call, else on to the next one; the accumulator holds the number before and after."""
    number = _number(name)
    return [_step(_EQUAL, number, 0, len(steps)), *steps] if number >= 0 else []


def _argument(index: int) -> bytes:
    return _step(_LOAD, _ARGUMENTS + 8 * index)  # its lower half: both machines are little-endian


def _refused() -> bytes:
    return _step(_RETURN, _ERRNO | errno.EPERM)


def _allowed() -> bytes:
    return _step(_RETURN, _ALLOW)


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _install(rules: list[bytes]) -> None:
    audit, _ = _machine()
    prologue = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, audit, 1, 0), _refused(), _step(_LOAD, _NUMBER)]
    if platform.machine() == "x86_64":
        prologue += [_step(_GREATER_EQUAL, _X32, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    program = b"".join([*prologue, *rules, _allowed()])
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    no_new_privileges()
    checked(libc().prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), header, 0, 0), "seccomp")
