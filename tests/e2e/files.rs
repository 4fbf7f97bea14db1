//! Files that are no configs: special files, endless files, and files with secrets, which must not appear in a log.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::gateway::BINARY;

fn isthmus(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(BINARY);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    // The write may fail, because the program may end before it has read everything.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("it ends")
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

#[test]
fn secrets_in_files_that_are_no_config_are_not_quoted() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let write = |name: &str, text: &str| std::fs::write(at(name), text).expect("written");
    write("config.yaml", "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\ninclude: secret\n");
    let registry = "exports: [{services: [\"*\"]}]\nregistries: [{file: {path: secret, cluster: west}}]\n";
    write("registry.yaml", &format!("listen: \"127.0.0.1:0\"\n{registry}"));
    for secret in [
        "root:$y$j9T$SECRETSECRET$x:19000:0:99999:7:::\n",
        "-----BEGIN PRIVATE KEY-----\nSECRETSECRETSECRETSECRETSECRETSECRET\n-----END PRIVATE KEY-----\n",
        "SECRET0123456789abcdef\n",
        "\"SECRET with blanks\": 1\n",
        "a: {\"SECRET/of+base64=\": 1}\n",
        "\"SECRET+twice\": 1\n\"SECRET+twice\": 1\n",
        "password: SECRETSECRET\n",
        "- SECRETSECRET\n",
        "services: SECRET of another kind\n",
    ] {
        write("secret", secret);
        for file in ["config.yaml", "registry.yaml", "secret"] {
            let path = at(file);
            let output = isthmus(&["validate", path.to_str().expect("text")], "");
            let said = said(&output);
            assert!(!output.status.success() && said.contains("secret:"), "{file} {secret}: {said}");
            assert!(!said.contains("SECRET"), "{file} {secret}: {said}");
        }
    }
}

#[test]
fn only_a_file_is_run_and_a_person_may_validate_a_pipe() {
    let good = "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\n";
    for path in ["-", "/dev/stdin"] {
        let output = isthmus(&["validate", path], good);
        assert!(output.status.success(), "{}", said(&output));
        let output = isthmus(&["validate", path], "lisen: 1\n");
        assert!(said(&output).contains("/dev/stdin:1:1: lisen"), "{}", said(&output));
    }
    let output = isthmus(&["validate", "/dev/zero"], "");
    assert!(said(&output).contains("is larger than 256 MiB"), "{}", said(&output));
    for (path, what) in [("/dev/zero", "a device"), ("/dev/stdin", "a pipe")] {
        let output = isthmus(&["run", "-c", path], good);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(&format!("it is {what}, not a regular file")), "{}", said(&output));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let link = folder.path().join("link.yaml");
    std::fs::write(folder.path().join("data"), good).expect("written");
    std::os::unix::fs::symlink(Path::new("data"), &link).expect("linked");
    let output = isthmus(&["validate", link.to_str().expect("text")], "");
    assert!(output.status.success(), "{}", said(&output));
}
