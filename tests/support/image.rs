//! The container image, built and run without a container engine. umoci builds it from `examples/docker/Dockerfile` and unpacks
//! it; the tests run it as a container runtime does: on a read-only root, as the image's user, without capabilities.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::helm::{path, said};
use super::skip;

/// Returns the path of the static binary: `ISTHMUS_STATIC`, or the one that `tests/run` has built.
pub fn static_binary() -> Option<OsString> {
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop/isthmus-static");
    std::env::var_os("ISTHMUS_STATIC").or_else(|| usual.exists().then(|| usual.into_os_string()))
}

/// An unpacked image.
pub struct Image {
    folder: TempDir,
    /// The image's config for a container runtime: OCI's `config.json`.
    pub config: Value,
}

impl Image {
    /// Builds and unpacks the image. Returns `None`, after reporting a skip, if this host cannot build it.
    pub fn build(test: &str) -> Option<Self> {
        let Some(binary) = static_binary() else {
            skip(&format!("{test}: there is no static binary (tests/run links one)"));
            return None;
        };
        if !rustix::process::geteuid().is_root() {
            skip(&format!("{test}: only root can unpack an image with its owners"));
            return None;
        }
        if Command::new("umoci").arg("--version").stdout(Stdio::null()).status().is_err() {
            skip(&format!("{test}: there is no umoci"));
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let umoci = |arguments: &[&str]| {
            let mut command = Command::new("umoci");
            command.args(arguments).current_dir(folder.path());
            said(command.output().expect("umoci runs"))
                .unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
        };
        umoci(&["init", "--layout", "image"]);
        umoci(&["new", "--image", "image:latest"]);
        for step in steps(&dockerfile()) {
            let arguments = umoci_step(&step, &binary);
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            if let [command, rest @ ..] = &arguments[..] {
                umoci(&[&[*command, "--image", "image:latest"], rest].concat());
            }
        }
        umoci(&["unpack", "--image", "image:latest", "bundle"]);
        let config = std::fs::read_to_string(folder.path().join("bundle/config.json")).expect("a config");
        Some(Self { folder, config: serde_json::from_str(&config).expect("JSON") })
    }

    /// Returns the root of the image's file system.
    pub fn root(&self) -> PathBuf {
        self.folder.path().join("bundle/rootfs")
    }

    /// Returns a command that runs the image's entry point with these arguments, with the folder `config` mounted at
    /// `/etc/isthmus`. The gateway takes the place of the command's process.
    pub fn command(&self, arguments: &[&str], config: &Path) -> Command {
        // The steps that a container runtime takes before it drops root's privileges: mount points, proc, and the mounts of the
        // container.
        const SCRIPT: &str = "
            root=$1 config=$2; shift 2
            mkdir -p $root/proc $root/etc/isthmus $root/var/lib/isthmus
            mount --bind $root $root
            mount -t proc proc $root/proc
            mount --bind $config $root/etc/isthmus
            mount -o remount,bind,ro $root/etc/isthmus
            mount -t tmpfs -o size=16m,mode=1777 tmpfs $root/var/lib/isthmus
            mount -o remount,bind,ro $root
            PATH=$PATH:/usr/sbin:/sbin exec setpriv --no-new-privs --clear-groups chroot --userspec=65532:65532 $root \"$@\"";
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let entry = text(&self.config["process"]["args"][0]);
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-ec", SCRIPT, "sh"])
            .arg(self.root())
            .arg(config)
            .arg(entry)
            .args(arguments);
        command
    }
}

fn dockerfile() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/docker/Dockerfile");
    std::fs::read_to_string(file).expect("the Dockerfile")
}

/// Returns the instructions of a Dockerfile, one each; lines that end in a backslash are joined with the next.
fn steps(dockerfile: &str) -> Vec<String> {
    let lines = dockerfile.lines().filter(|line| !line.starts_with('#'));
    let text = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
}

/// Returns the arguments of umoci that carry out an instruction.
fn umoci_step(step: &str, binary: &OsString) -> Vec<String> {
    let (instruction, rest) = step.split_once(' ').unwrap_or((step, ""));
    let config = |key: &str, values: Vec<String>| -> Vec<String> {
        let options = values.into_iter().flat_map(|value| [format!("--config.{key}"), value]);
        ["config".to_owned()].into_iter().chain(options).collect()
    };
    let list = |text: &str| -> Vec<String> { serde_json::from_str(text).expect("the form of a list") };
    match instruction {
        "FROM" => {
            assert_eq!(rest, "scratch");
            Vec::new()
        }
        "ARG" => Vec::new(),
        "COPY" => {
            let target = rest.strip_prefix("--chmod=0755 ${BINARY} ").expect("the binary, and nothing else");
            ["insert", path(Path::new(binary)), target].map(str::to_owned).to_vec()
        }
        "LABEL" => config("label", labels(rest)),
        "USER" => config("user", vec![rest.to_owned()]),
        "WORKDIR" => config("workingdir", vec![rest.to_owned()]),
        "EXPOSE" => {
            config("exposedports", rest.split_whitespace().map(|port| format!("{port}/tcp")).collect())
        }
        "ENTRYPOINT" => config("entrypoint", list(rest)),
        "CMD" => config("cmd", list(rest)),
        other => panic!("{other} is not done here: keep the Dockerfile to what a test can do"),
    }
}

/// Parses a list of `name="value"` into texts `name=value`.
fn labels(text: &str) -> Vec<String> {
    let mut labels = Vec::new();
    let mut rest = text.trim();
    while let Some((name, more)) = rest.split_once("=\"") {
        let (value, more) = more.split_once('"').expect("a closing quote");
        labels.push(format!("{name}={value}"));
        rest = more.trim_start();
    }
    labels
}
