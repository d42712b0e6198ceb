"""The system calls that a program in the sandbox may not make, as a classic BPF program for seccomp."""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from types import MappingProxyType

# Name -> (x86_64, aarch64). What reaches into the kernel, other processes, mounts or namespaces, and what takes memory
# that no limit counts (memfd, System V shared memory).
DENIED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "kcmp": (312, 272),
        "pidfd_getfd": (438, 438),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "quotactl": (179, 60),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "unshare": (272, 97),
        "setns": (308, 268),
        "keyctl": (250, 219),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "reboot": (169, 142),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "acct": (163, 89),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "syslog": (103, 116),
        "personality": (135, 92),
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "shmget": (29, 194),
        "msgget": (68, 186),
        "semget": (64, 190),
    }
)

_ARCHITECTURES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
)
"""Machine -> column of the numbers, audit code."""

_CLONE, _CLONE3, _SOCKET, _PRLIMIT = (56, 220), (435, 435), (41, 198), (302, 261)
_NEW_NAMESPACES = 0x7E020000
_UNIX, _INET = 1, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def supported() -> bool:
    """Whether the calls of this machine's architecture are known here."""
    return platform.machine() in _ARCHITECTURES


def program(*, loopback: bool) -> bytes:
    """The filter: a denied call kills the process with SIGSYS. Raises KeyError on another architecture.

    Without `loopback` every socket but a Unix one is denied; with it IPv4 sockets are allowed and others fail.
    """
    column, audit = _ARCHITECTURES[platform.machine()]
    code = [_op(_LOAD, 4), _op(_EQUAL, audit, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    # x32 calls carry a high bit and would pass under other numbers.
    code += [_op(_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _KILL)]
    for numbers in DENIED.values():
        code += [_op(_EQUAL, numbers[column], 0, 1), _op(_RETURN, _KILL)]
    # clone3 hides its flags behind a pointer: the C library falls back to clone.
    code += [_op(_EQUAL, _CLONE3[column], 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [_op(_EQUAL, _CLONE[column], 0, 3), _op(_LOAD, 16), _op(_ANY_BIT, _NEW_NAMESPACES, 0, 1)]
    code += [_op(_RETURN, _KILL), _op(_LOAD, 0)]
    # Limits of other processes: the one that watches is of the same user.
    code += [_op(_EQUAL, _PRLIMIT[column], 0, 3), _op(_LOAD, 16), _op(_EQUAL, 0, 1, 0)]
    code += [_op(_RETURN, _KILL), _op(_LOAD, 0)]
    code += [_op(_EQUAL, _SOCKET[column], 1, 0), _op(_RETURN, _ALLOW), _op(_LOAD, 16)]
    for family in (_UNIX, _INET) if loopback else (_UNIX,):
        code += [_op(_EQUAL, family, 0, 1), _op(_RETURN, _ALLOW)]
    return b"".join([*code, _op(_RETURN, _ERRNO | errno.EAFNOSUPPORT if loopback else _KILL)])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
