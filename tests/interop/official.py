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
    # Left to the system to clean up: modules may read it as long as the process lives.
    folder = tempfile.mkdtemp(prefix="isthmus-official-")
    builtin = pathlib.Path(protoc.__file__).parent / "_proto"
    files = [str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto")]
    arguments = [f"-I{SOURCES}", f"-I{builtin}", f"--python_out={folder}", f"--grpc_python_out={folder}", *files]
    if protoc.main(["protoc", *arguments]) != 0:
        raise RuntimeError("protoc failed")
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
