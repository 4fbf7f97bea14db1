#!/usr/bin/env python3
"""Lists what a binary is made of: sbom.py TARGET FEATURES SBOM [NOTICES [MESSAGES]].

SBOM is a CycloneDX document in JSON: each package that Cargo compiles for TARGET with the crate's FEATURES (a comma between two), and
the libraries of Rust and C that the static binary contains. A package that only takes part in the build has the scope `excluded`.
NOTICES is a text file with the licences of the packages in the binary. MESSAGES is a file with the messages of the build
(`--message-format json`): the script fails if Cargo has compiled a package that the SBOM lacks.
"""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import tomllib
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The beginnings of names of files with licences, in lower case.
LICENCES = ("license", "licence", "copying", "copyright", "notice", "unlicense")


def output(*command):
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def packages(selection, edges):
    """Returns the (name, version) of each package that Cargo reaches by these kinds of edges. `cargo metadata` cannot tell: it also
    has packages of features that nobody enables."""
    lines = output("cargo", "tree", *selection, "--package", "isthmus", "--edges", edges, "--prefix", "none", "--format", "{p}")
    words = (line.split() for line in lines.splitlines() if line.strip())
    return {(name, version.removeprefix("v")) for name, version, *_ in words}


def linked(target):
    """Yields the libraries that a static binary contains beside packages of Cargo: name, version, licence."""
    rust = dict(line.split(": ", 1) for line in output("rustc", "--version", "--verbose").splitlines()[1:])
    yield "rust-std", rust["release"], "MIT OR Apache-2.0"
    if target.endswith("-gnu"):
        yield "glibc", output("getconf", "GNU_LIBC_VERSION").split()[1], "LGPL-2.1-or-later"
        yield "libgcc", output("cc", "-dumpfullversion").strip(), "GPL-3.0-or-later WITH GCC-exception-3.1"


def component(package, checksum, scope):
    name, version = package["name"], package["version"]
    made = {"type": "library", "bom-ref": f"{name}@{version}", "name": name, "version": version, "scope": scope}
    if package.get("license"):
        made["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if checksum:
        made["purl"] = f"pkg:cargo/{name}@{version}"
        made["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package.get("repository"):
        made["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return made


def edges(metadata, known):
    """Yields each package with the packages that it depends on, but for its tests."""
    reference = {package["id"]: f"{package['name']}@{package['version']}" for package in metadata["packages"]}
    for node in metadata["resolve"]["nodes"]:
        if reference[node["id"]] in known:
            needs = {reference[dep["pkg"]] for dep in node["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])}
            yield {"ref": reference[node["id"]], "dependsOn": sorted(needs & known)}


def licences(packages):
    """Returns the licences of packages of others; a text that several have appears once."""
    texts = {}
    for package in packages:
        folder = pathlib.Path(package["manifest_path"]).parent
        files = sorted(path for path in folder.rglob("*") if path.name.lower().startswith(LICENCES) and path.is_file())
        for path in files:
            if path.suffix.lower() in ("", ".txt", ".md") or path.name.lower().startswith("license"):
                text = path.read_text(errors="replace").strip()
                texts.setdefault(text, set()).add(f"{package['name']} {package['version']}")
        if not files:
            texts.setdefault(f"License: {package['license']}", set()).add(f"{package['name']} {package['version']}")
    parts = (f"{', '.join(sorted(names))}\n\n{text}\n" for text, names in sorted(texts.items(), key=lambda item: sorted(item[1])))
    return ("\n" + "=" * 80 + "\n").join(parts)


def compiled_by(messages):
    """Returns the (name, version) of each package in the messages of a build."""
    found = set()
    for line in pathlib.Path(messages).read_text().splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact":
            source, _, package = message["package_id"].partition("#")
            name, at, version = package.partition("@")
            found.add((name, version) if at else (source.rsplit("/", 1)[-1], package))
    return found


def main(target, features, sbom, notices=None, messages=None):
    selection = ["--locked", "--no-default-features", "--features", features]
    metadata = json.loads(output("cargo", "metadata", *selection, "--format-version", "1", "--filter-platform", target))
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    checksums = {(package["name"], package["version"]): package.get("checksum") for package in locked}
    details = {(package["name"], package["version"]): package for package in metadata["packages"]}
    compiled = packages([*selection, "--target", target], "normal,build")
    if messages and (missing := compiled_by(messages) - compiled):
        sys.exit(f"the build has compiled packages that cargo tree does not name: {sorted(missing)}")
    contained = packages([*selection, "--target", target], "normal,no-proc-macro")
    root = next(key for key in compiled if key[0] == "isthmus")
    components = [
        component(details[key], checksums[key], "required" if key in contained else "excluded") for key in sorted(compiled - {root})
    ]
    known = {f"{name}@{version}" for name, version in compiled}
    graph = sorted(edges(metadata, known), key=lambda edge: edge["ref"])
    top = next(edge for edge in graph if edge["ref"] == "@".join(root))
    for name, version, licence in linked(target):
        components.append(component({"name": name, "version": version, "license": licence}, None, "required"))
        components[-1]["purl"] = f"pkg:generic/{name}@{version}"
        top["dependsOn"].append(f"{name}@{version}")
    time = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.timezone.utc)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([target, components, time.timestamp()])).urn,
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {**component(details[root], None, "required"), "type": "application"},
            "properties": [{"name": "isthmus:target", "value": target}, {"name": "isthmus:features", "value": features}],
        },
        "components": components,
        "dependencies": graph,
    }
    pathlib.Path(sbom).write_text(json.dumps(document, indent=1) + "\n")
    if notices:
        others = [details[key] for key in sorted(contained) if checksums[key]]
        pathlib.Path(notices).write_text(licences(others))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5, 6):
        sys.exit(__doc__)
    main(*sys.argv[1:])
