//! The container image, built and run without a container engine. `examples/release/image.py` builds it, umoci unpacks it, and the
//! tests run it as a container runtime does: on a read-only root, as the image's user, without capabilities.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::helm::said;
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
    /// Builds and unpacks the image. Returns `None`, after reporting a skip, if this host cannot.
    pub fn build(test: &str) -> Option<Self> {
        let Some(binary) = static_binary() else {
            skip(&format!("{test}: there is no static binary (tests/run links one)"));
            return None;
        };
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("image.tar");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/release/image.py");
        let mut build = Command::new("python3");
        said(build.arg(script).arg(binary).arg(&file).output().expect("python3 runs"))
            .unwrap_or_else(|error| panic!("{error}"));
        Self::unpack(test, &file)
    }

    /// Unpacks the tar file of an image. Returns `None`, after reporting a skip, if this host cannot.
    pub fn unpack(test: &str, file: &Path) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip(&format!("{test}: only root can unpack an image with its owners"));
            return None;
        }
        if Command::new("umoci").arg("--version").stdout(Stdio::null()).status().is_err() {
            skip(&format!("{test}: there is no umoci"));
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let run = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments).current_dir(folder.path());
            said(command.output().expect("it starts"))
                .unwrap_or_else(|error| panic!("{program} {arguments:?}: {error}"))
        };
        std::fs::create_dir(folder.path().join("image")).expect("made");
        run("tar", &["-xf", file.to_str().expect("a path of letters"), "-C", "image"]);
        run("umoci", &["unpack", "--image", concat!("image:", env!("CARGO_PKG_VERSION")), "bundle"]);
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
