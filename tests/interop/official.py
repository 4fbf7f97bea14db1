"""Messages that PyPI has only as text: compiled by Google's compiler from `official/` when they are imported."""

import importlib
import pathlib
import sys
import tempfile

from grpc_tools import protoc

SOURCES = pathlib.Path(__file__).parent / "official"


def module(name):
    """The module `name` of what was compiled, such as `security.v1alpha1.ca_pb2`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        compile_all()
        return importlib.import_module(name)


def compile_all():
    builtin = pathlib.Path(protoc.__file__).parent / "_proto"
    files = [path.relative_to(SOURCES) for path in SOURCES.rglob("*.proto")]
    # All is loaded at once, so that nothing is left behind by a process that is killed later.
    with tempfile.TemporaryDirectory(prefix="isthmus-official-") as folder:
        arguments = [f"-I{SOURCES}", f"-I{builtin}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        if protoc.main(["protoc", *arguments, *map(str, files)]) != 0:
            raise RuntimeError("protoc failed")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        for file in files:
            for kind in ("pb2", "pb2_grpc"):
                importlib.import_module(".".join(file.with_suffix("").parts) + f"_{kind}")
        sys.path.remove(folder)
