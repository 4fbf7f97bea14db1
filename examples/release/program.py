"""What a program for Linux says about itself, in the header of its file (ELF)."""

import pathlib
import struct
import sys

# The machine by the field `e_machine`: the name that Linux and wheels use, and the one of images.
MACHINES = {62: ("x86_64", "amd64"), 183: ("aarch64", "arm64")}
# The type of a program header that names the loader of shared libraries.
PT_INTERP = 3


def read(path):
    """Returns a static program with the two names of its machine; ends the script for one that would not run everywhere."""
    program = pathlib.Path(path).read_bytes()
    if program[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", program, 18)[0] not in MACHINES:
        sys.exit(f"{path} is no program for Linux on x86-64 or arm64")
    begin, = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    if PT_INTERP in (struct.unpack_from("<I", program, begin + index * size)[0] for index in range(count)):
        sys.exit(f"{path} needs shared libraries; build it with -C target-feature=+crt-static")
    return program, MACHINES[struct.unpack_from("<H", program, 18)[0]]
