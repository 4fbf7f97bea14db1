#!/usr/bin/env python3
"""Packs a binary as a Python wheel, so that pip, pipx and uv can install it: wheel.py BINARY FOLDER FILE… Prints the path of the wheel.

The wheel has no Python code: the binary is its script, and the FILEs are its licences. BINARY must be static, because the wheel's tag
says that it runs on any Linux with the C library of manylinux_2_17 or a later one. With the same files, `SOURCE_DATE_EPOCH` and
`GZIP_LEVEL` (6), the wheel is the same, byte for byte.
"""

import base64
import hashlib
import os
import pathlib
import sys
import time
import tomllib
import zipfile

sys.dont_write_bytecode = True
import program

README = """\
Isthmus connects services on different networks. It routes TLS connections by their server name without decrypting them, and tells Envoy
and gRPC clients over xDS which endpoints they can reach.

    isthmus demo     # two networks on this host, and what a gateway between them does
    isthmus --help

It runs on Linux. The wheel has the whole program: one static binary, without Python code and without dependencies.
"""


def main(binary, output, licences):
    binary, (machine, _) = program.read(binary)
    manifest = tomllib.loads((pathlib.Path(__file__).parents[2] / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    tag = f"py3-none-manylinux_2_17_{machine}"
    about = f"isthmus-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: isthmus\nVersion: {version}\nSummary: {manifest['package']['description']}\n"
        f"License: {manifest['workspace']['package']['license']}\nClassifier: Operating System :: POSIX :: Linux\n"
        "Classifier: Topic :: Internet :: Proxy Servers\nRequires-Python: >=3.7\nDescription-Content-Type: text/markdown\n\n" + README
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: isthmus examples/release/wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        f"isthmus-{version}.data/scripts/isthmus": (0o755, binary),
        f"{about}/METADATA": (0o644, metadata.encode()),
        f"{about}/WHEEL": (0o644, wheel.encode()),
        **{f"{about}/licenses/{path.name}": (0o644, path.read_bytes()) for path in map(pathlib.Path, licences)},
    }
    rows = [f"{path},sha256={digest(content)},{len(content)}\n" for path, (_, content) in files.items()]
    files[f"{about}/RECORD"] = (0o644, ("".join(rows) + f"{about}/RECORD,,\n").encode())
    # A zip file cannot name a time before 1980.
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315_532_800))[:6]
    path = pathlib.Path(output) / f"isthmus-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (mode, content) in files.items():
            entry = zipfile.ZipInfo(name, moment)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content, compresslevel=int(os.environ.get("GZIP_LEVEL", "6")))
    print(path)


def digest(content):
    """Returns a digest in the form of a wheel's RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
