#!/usr/bin/env python3
"""Makes the image of examples/docker/Dockerfile from a static binary, without a container engine: image.py BINARY FILE.

FILE is a tar file with an OCI image layout, and with the `manifest.json` that `docker load` reads. The tag is the version that the
Dockerfile names. With the same binary, `SOURCE_DATE_EPOCH` and `GZIP_LEVEL` (6), the file is the same, byte for byte.
"""

import datetime
import gzip
import hashlib
import io
import json
import os
import pathlib
import shlex
import sys
import tarfile

sys.dont_write_bytecode = True
import program

DOCKERFILE = pathlib.Path(__file__).parents[1] / "docker" / "Dockerfile"


def instructions(dockerfile):
    """Yields each instruction with the text after it; lines that end in a backslash are joined with the next."""
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            yield line.split(maxsplit=1)


def archive(files, time):
    """Returns a tar file of (path, mode, content); a content of None is a folder."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, mode, content in files:
            entry = tarfile.TarInfo(path)
            entry.mode, entry.mtime = mode, time
            if content is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content or b""))
    return written.getvalue()


def folders(path):
    """Returns the folders that contain a path, the outermost first."""
    return [(str(parent), 0o755, None) for parent in reversed(pathlib.PurePosixPath(path).parents) if parent.name]


def read(dockerfile, binary):
    """Returns the part `config` of the image's config, and the files of its layer."""
    config, files = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}, []
    for instruction, rest in instructions(dockerfile):
        if (instruction, rest) == ("FROM", "scratch") or instruction == "ARG":
            continue
        elif instruction == "COPY":
            mode, source, target = rest.split()
            if (mode, source) != ("--chmod=0755", "${BINARY}"):
                sys.exit(f"COPY {rest}: the binary is the only file that is copied")
            files += [*folders(target.strip("/")), (target.strip("/"), 0o755, binary)]
        elif instruction == "WORKDIR":
            config["WorkingDir"] = rest
            files += [*folders(rest.strip("/")), (rest.strip("/"), 0o755, None)]
        elif instruction == "LABEL":
            config["Labels"] = dict(label.split("=", 1) for label in shlex.split(rest))
        elif instruction == "EXPOSE":
            config["ExposedPorts"] = {f"{port}/tcp": {} for port in rest.split()}
        elif instruction == "USER":
            config["User"] = rest
        elif instruction in ("ENTRYPOINT", "CMD"):
            config[instruction.capitalize()] = json.loads(rest)
        else:
            sys.exit(f"{instruction} is not known here: keep the Dockerfile to what this script reads")
    return config, files


def main(binary, output):
    binary, (_, architecture) = program.read(binary)
    time = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    config, files = read(DOCKERFILE.read_text(), binary)
    version = config["Labels"]["org.opencontainers.image.version"]
    layer = archive(files, time)
    blobs = {}

    def blob(content, kind):
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    def document(value):
        return json.dumps(value, separators=(",", ":")).encode()

    layers = [blob(gzip.compress(layer, compresslevel=int(os.environ.get("GZIP_LEVEL", "6")), mtime=0), "layer.v1.tar+gzip")]
    described = blob(document({
        "created": datetime.datetime.fromtimestamp(time, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "architecture": architecture,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }), "config.v1+json")
    manifest = blob(document({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described,
        "layers": layers,
        "annotations": config["Labels"],
    }), "manifest.v1+json")
    manifest["annotations"] = {
        "org.opencontainers.image.ref.name": version,
        "io.containerd.image.name": f"docker.io/library/isthmus:{version}",
    }
    manifest["platform"] = {"architecture": architecture, "os": "linux"}

    def path(of):
        return "blobs/sha256/" + of["digest"].removeprefix("sha256:")

    loaded = [{"Config": path(described), "RepoTags": [f"isthmus:{version}"], "Layers": [path(one) for one in layers]}]
    members = {
        "oci-layout": document({"imageLayoutVersion": "1.0.0"}),
        "index.json": document({"schemaVersion": 2, "manifests": [manifest]}),
        "manifest.json": document(loaded),
        **blobs,
    }
    pathlib.Path(output).write_bytes(archive([(name, 0o644, content) for name, content in members.items()], time))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
