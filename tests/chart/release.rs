//! The files of a release, which `examples/release/make` makes of the static binary: each is verified, installed without Rust and without
//! a network, and tried.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::gateway::{Gateway, with_common};
use crate::support::helm::{Helm, RELEASE, object, said};
use crate::support::image::{Image, static_binary};
use crate::support::namespace::inside;
use crate::support::{kube, python, skip, yaml};

const VERSION: &str = env!("CARGO_PKG_VERSION");
const NAME: &str = "api.example.com";

/// A release of the files as they are, signed with a new key.
struct Release {
    folder: TempDir,
    /// The lines that the script has printed.
    printed: String,
}

impl Release {
    /// Makes the release. Returns `None`, after reporting a skip, if this host lacks something that every release needs.
    fn make(test: &str) -> Option<Self> {
        let Some(binary) = static_binary() else {
            skip(&format!("{test}: there is no static binary (tests/run links one)"));
            return None;
        };
        if !succeeds("python3", &["-c", "import tomllib, venv"])
            || !succeeds("sh", &["-c", "command -v ssh-keygen"])
        {
            skip(&format!("{test}: there is no Python 3.11 with venv, or no ssh-keygen"));
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let key = folder.path().join("key");
        run(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key));
        let mut make = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/release/make"));
        make.arg(".").arg(folder.path().join("files")).arg("--trial").arg("--key").arg(&key);
        make.arg("--binary").arg(&binary).arg("--image-binary").arg(&binary).env("CARGO_NET_OFFLINE", "true");
        if let Some(helm) = kube::helm() {
            make.env("ISTHMUS_HELM", helm);
        }
        let printed = run(&mut make);
        Some(Self { folder, printed })
    }

    fn files(&self) -> PathBuf {
        self.folder.path().join("files")
    }

    /// Returns the path of a file of the release.
    fn file(&self, name: &str) -> PathBuf {
        let path = self.files().join(name);
        assert!(path.is_file(), "{name} is missing:\n{}", self.printed);
        path
    }
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// Runs a command that must succeed, and returns its output.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    said(output).unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

#[test]
fn each_file_of_a_release_is_verified_installed_and_tried() {
    const TEST: &str = "each_file_of_a_release_is_verified_installed_and_tried";
    if !inside(&format!("release::{TEST}"), "ip link set lo up") {
        return;
    }
    let Some(release) = Release::make(TEST) else { return };
    the_signature_covers_every_file(&release);
    the_archive_has_a_gateway(&release);
    the_wheel_has_a_gateway(&release);
    the_package_can_be_upgraded_and_removed(&release);
    the_image_runs(&release);
    the_chart_names_the_image(&release);
    the_list_of_parts_is_complete(&release, "", "convert,demo,kubernetes");
    the_list_of_parts_is_complete(&release, "-image", "kubernetes");
    let skipped = release.printed.lines().filter(|line| line.starts_with("SKIPPED: ")).count();
    let last = release.printed.lines().last().expect("a line");
    assert!(last.ends_with(&format!(", {skipped} skipped")), "{}", release.printed);
}

fn the_signature_covers_every_file(release: &Release) {
    let files = release.files();
    let sums = fs::read_to_string(release.file("SHA256SUMS")).expect("a list");
    let listed: BTreeSet<&str> = sums.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    let there: BTreeSet<String> = fs::read_dir(&files)
        .expect("a folder")
        .flatten()
        .map(|file| file.file_name().into_string().expect("UTF-8"))
        .collect();
    let unlisted: Vec<_> = there.iter().filter(|name| !listed.contains(name.as_str())).collect();
    assert_eq!(unlisted, ["SHA256SUMS", "SHA256SUMS.sig"]);
    run(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(&files));

    // The line that the script says to publish is what a user verifies with.
    let signer =
        release.printed.lines().find(|line| line.starts_with("isthmus ssh-ed25519 ")).expect("the signer");
    fs::write(release.folder.path().join("signers"), format!("{signer}\n")).expect("written");
    let verify = |sums: &str| {
        let command = "ssh-keygen -Y verify -f ../signers -I isthmus -n file -s SHA256SUMS.sig";
        fs::write(release.folder.path().join("sums"), sums).expect("written");
        succeeds("sh", &["-c", &format!("cd {} && {command} < ../sums", files.display())])
    };
    assert!(verify(&sums));
    assert!(!verify(&sums.replacen('0', "1", 1)), "a changed list is verified too");
}

fn the_archive_has_a_gateway(release: &Release) {
    let begun = Instant::now();
    let folder = tempfile::tempdir().expect("a folder");
    let archive = release.file(&format!("isthmus-{VERSION}-{}-linux.tar.gz", std::env::consts::ARCH));
    run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(folder.path()));
    let root = folder.path().join(format!("isthmus-{VERSION}"));
    answers("archive", begun, &root.join("isthmus"));
    let notices = fs::read_to_string(root.join("NOTICES.txt")).expect("the licences of others");
    assert!(notices.contains("rustls ") && notices.contains("Permission is hereby granted"));
}

fn the_wheel_has_a_gateway(release: &Release) {
    let wheel =
        release.file(&format!("isthmus-{VERSION}-py3-none-manylinux_2_17_{}.whl", std::env::consts::ARCH));
    let folder = tempfile::tempdir().expect("a folder");
    run(Command::new("python3").args(["-m", "venv"]).arg(folder.path()));
    let begun = Instant::now();
    let mut pip = Command::new(folder.path().join("bin/pip"));
    run(pip.args(["install", "--no-index", "--disable-pip-version-check"]).arg(&wheel));
    answers("wheel", begun, &folder.path().join("bin/isthmus"));

    let Some(python) = python::with_installers() else {
        return skip("release: pipx and uv are not installed (tests/run installs them)");
    };
    let bin = Path::new(&python).parent().expect("a folder").to_owned();
    let mut pipx = Command::new(bin.join("pipx"));
    pipx.args(["run", "--backend", "uv", "--spec"]).arg(&wheel).args(["isthmus", "demo"]).env_clear();
    pipx.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", bin.display())).env("UV_OFFLINE", "1");
    pipx.env("HOME", folder.path()).current_dir(folder.path());
    run(&mut pipx);
}

/// Runs an installed binary as a gateway, in a folder that has nothing but its config, and calls an endpoint through it.
#[track_caller]
#[expect(clippy::print_stderr, reason = "a figure of a test is for who reads its output")]
fn answers(what: &str, begun: Instant, binary: &Path) {
    let (backend, folder) = (Backend::echo(), tempfile::tempdir().expect("a folder"));
    let config = format!(
        "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\nroutes: {{{NAME}: \"{}\"}}\n",
        backend.address
    );
    fs::write(folder.path().join("isthmus.yaml"), with_common(&config)).expect("written");
    let mut command = Command::new(binary);
    command.arg("run").current_dir(folder.path()).env_clear();
    let gateway = Gateway::spawn(command, folder);
    let (mut stream, sent) = (connect(gateway.listener("edge")), hello(NAME));
    stream.write_all(&sent).expect("sent");
    let mut echoed = vec![0; sent.len()];
    stream.read_exact(&mut echoed).expect("an echo");
    assert_eq!(echoed, sent);
    eprintln!("{what}: {:.1} s from the installation to the first answer", begun.elapsed().as_secs_f32());
}

/// Installs, upgrades, removes and purges the package, in a copy of this host's file system that is thrown away.
fn the_package_can_be_upgraded_and_removed(release: &Release) {
    if !succeeds("dpkg-deb", &["--version"]) {
        return skip("release: there is no dpkg-deb");
    }
    let architecture = run(Command::new("dpkg").arg("--print-architecture"));
    let package = release.file(&format!("isthmus_{VERSION}_{}.deb", architecture.trim()));
    let listed = run(Command::new("dpkg-deb").arg("--contents").arg(&package));
    assert!(listed.lines().all(|line| line.contains(" root/root ")), "{listed}");
    assert!(
        !run(Command::new("dpkg-deb").arg("--field").arg(&package)).contains("Depends"),
        "the binary is static"
    );

    const SCRIPT: &str = r##"
        mount -t tmpfs tmpfs "$2" && cd "$2" && mkdir upper work root
        mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root || exit 77
        mkdir root/release
        cp "$1" root/release/first.deb
        dpkg-deb -R "$1" next && sed -i 's/^Version: .*/&+next/' next/DEBIAN/control && dpkg-deb -Znone -b next root/release/next.deb
        mount -t proc proc root/proc && mount --rbind /dev root/dev
        exec chroot root sh -exc '
            export PATH=/usr/sbin:/usr/bin:/sbin:/bin
            gone() { if test -e "$1" || test -L "$1"; then echo "$1 is left" >&2; exit 1; fi; }
            dpkg -i /release/first.deb
            isthmus validate /etc/isthmus/isthmus.yaml
            test -s /usr/lib/systemd/system/isthmus.service
            zcat /usr/share/man/man1/isthmus-explain.1.gz | grep -q explain
            test -s /usr/share/zsh/vendor-completions/_isthmus
            if pidof isthmus; then exit 1; fi

            mkdir -p /run/isthmus /var/lib/private/isthmus /etc/systemd/system/multi-user.target.wants
            ln -s /usr/lib/systemd/system/isthmus.service /etc/systemd/system/multi-user.target.wants/
            isthmus run -c /etc/isthmus/isthmus.yaml >/release/log 2>&1 & gateway=$!
            for attempt in $(seq 100); do isthmus healthcheck && break; sleep 0.1; done
            isthmus healthcheck || { cat /release/log; exit 1; }

            echo "# edited" >>/etc/isthmus/isthmus.yaml
            dpkg -i /release/next.deb
            dpkg -s isthmus | grep "^Version: .*+next"
            grep edited /etc/isthmus/isthmus.yaml
            isthmus healthcheck
            kill $gateway

            dpkg -r isthmus
            gone /usr/bin/isthmus
            grep edited /etc/isthmus/isthmus.yaml
            test -d /var/lib/private/isthmus
            dpkg -P isthmus
            gone /etc/isthmus
            gone /var/lib/private/isthmus
            gone /etc/systemd/system/multi-user.target.wants/isthmus.service
            if dpkg -s isthmus; then exit 1; fi'
    "##;
    let work = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-exc", SCRIPT, "sh"])
        .arg(&package)
        .arg(work.path());
    let output = command.output().expect("unshare starts");
    if output.status.code() == Some(77) {
        return skip("release: no overlay of this host's file system can be mounted");
    }
    said(output).unwrap_or_else(|error| panic!("{error}"));
}

fn the_image_runs(release: &Release) {
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let tar = release.file(&format!("isthmus-{VERSION}-{}-image.tar", std::env::consts::ARCH));
    // `docker load` reads this list, and the layout beside it has the same content.
    let list = run(Command::new("tar").arg("-xOf").arg(&tar).arg("manifest.json"));
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!(list[0]["RepoTags"], serde_json::json!([format!("isthmus:{VERSION}")]));
    let config = list[0]["Config"].as_str().expect("a path");
    let config: Value =
        serde_json::from_str(&run(Command::new("tar").arg("-xOf").arg(&tar).arg(config))).expect("JSON");
    assert_eq!(config["architecture"], architecture);
    let Some(image) = Image::unpack("release", &tar) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(run(&mut image.command(&["--version"], folder.path())).trim(), format!("isthmus {VERSION}"));
}

fn the_chart_names_the_image(release: &Release) {
    let Some(helm) = Helm::installed() else { return };
    let chart = release.file(&format!("isthmus-{VERSION}-chart.tgz"));
    let repository = ["--set", "image.repository=registry.example/isthmus"];
    let rendered =
        helm.run(&[&["template", RELEASE, chart.to_str().expect("UTF-8")][..], &repository].concat());
    let rendered = rendered.unwrap_or_else(|error| panic!("{error}"));
    let deployment = object(&yaml::documents(&rendered), "Deployment", RELEASE).clone();
    let image = &deployment["spec"]["template"]["spec"]["containers"][0]["image"];
    assert!(image.as_str().is_some_and(|image| image.ends_with(&format!(":{VERSION}"))), "{image}");
}

/// Compares the SBOM with what `cargo tree` says is compiled, and its digests with those of the lock file.
fn the_list_of_parts_is_complete(release: &Release, kind: &str, features: &str) {
    let file = release.file(&format!("isthmus-{VERSION}-{}{kind}.cdx.json", std::env::consts::ARCH));
    let document: Value = serde_json::from_slice(&fs::read(file).expect("an SBOM")).expect("JSON");
    assert_eq!((&document["bomFormat"], &document["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let components = document["components"].as_array().expect("a list");
    let listed: BTreeMap<String, &Value> = components
        .iter()
        .map(|one| (format!("{} v{}", text(&one["name"]), text(&one["version"])), one))
        .collect();

    let target = text(&document["metadata"]["properties"][0]["value"]);
    let mut tree = Command::new(env!("CARGO"));
    tree.args([
        "tree",
        "--locked",
        "--offline",
        "--package",
        "isthmus",
        "--no-default-features",
        "--features",
        features,
    ]);
    tree.args(["--target", &target, "--edges", "normal,build", "--prefix", "none", "--format", "{p}"]);
    let tree = run(tree.current_dir(env!("CARGO_MANIFEST_DIR")));
    let package = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let mut compiled: BTreeSet<String> = tree.lines().filter(|line| !line.is_empty()).map(package).collect();
    assert!(compiled.remove(&format!("isthmus v{VERSION}")) && compiled.len() > 200, "{tree}");
    let missing: Vec<_> = compiled.iter().filter(|package| !listed.contains_key(*package)).collect();
    assert!(missing.is_empty(), "the SBOM lacks {missing:?}");
    let others = listed.keys().filter(|package| !compiled.contains(*package));
    let others: Vec<&str> = others.map(|package| package.split(' ').next().expect("a name")).collect();
    assert!(others == ["glibc", "libgcc", "rust-std"] || others == ["rust-std"], "{others:?}");

    let lock =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock")).expect("the lock file");
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let begin = format!("{name} = \"");
            package.lines().find_map(|line| line.strip_prefix(&begin)?.strip_suffix('"'))
        };
        let (Some(name), Some(version)) = (field("name"), field("version")) else { panic!("{package}") };
        let (Some(component), Some(digest)) = (listed.get(&format!("{name} v{version}")), field("checksum"))
        else {
            continue;
        };
        assert_eq!(component["hashes"][0]["content"], digest, "{name}");
        assert_eq!(component["purl"], format!("pkg:cargo/{name}@{version}"));
        assert!(component["licenses"][0]["expression"].is_string(), "{name}");
    }
    let known: BTreeSet<String> = components.iter().map(|one| text(&one["bom-ref"])).collect();
    for edge in document["dependencies"].as_array().expect("a list") {
        for needed in edge["dependsOn"].as_array().expect("a list") {
            assert!(known.contains(needed.as_str().expect("a text")), "{edge}");
        }
    }
}
