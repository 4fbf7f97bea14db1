//! Tests of includes, directories, and the files to watch.

use std::os::unix::fs::symlink;

use super::*;
use isthmus_aggregator::spec::RegistryKind;

/// Makes a directory with these files.
fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, text) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
    directory
}

/// Returns the paths that [`load`] reports to a watcher, in order.
fn watched(directory: &tempfile::TempDir, file: &str) -> Vec<String> {
    let mut told = Vec::new();
    let mut inside = |path: &Path| {
        told.push(path.strip_prefix(directory.path()).expect("inside").display().to_string());
    };
    load(&directory.path().join(file), &|_| None, &mut inside).expect("good");
    told
}

const SERVICE: &str = "ports: [{name: a, port: 1, targetPort: 2}]";

#[test]
fn included_maps_are_united_and_lists_appended() {
    let files = directory(&[
        (
            "c.yaml",
            "include: [conf.d/*.yaml, more.yaml, none.d/*.yaml]\nlisten: ':1'\nroutes: {a.b: 'c.d:1'}\n",
        ),
        ("conf.d/2.yaml", "routes: {e.f: 'c.d:1'}\nregistries: [{file: {path: r.yaml, cluster: west}}]\n"),
        ("conf.d/1.yaml", "limits: {connections: 5}\nlisteners: [{name: x, bind: ':2'}]\n"),
        ("conf.d/.hidden.yaml", "nonsense"),
        ("conf.d/note.txt", "nonsense"),
        ("none.d/note.txt", "nonsense"),
        ("more.yaml", "# nothing\n"),
        (
            "conf.d/3.yaml",
            &format!(
                "services: [{{hostname: a.b, namespace: c, {SERVICE}}}]\nlimits: {{pendingHellos: 3}}\n"
            ),
        ),
    ]);
    let config = load_file(files.path(), "c.yaml").expect("good");
    assert_eq!(config.policy.routes.len(), 2);
    assert_eq!(config.policy.listeners.len(), 2);
    assert_eq!((config.policy.limits.connections, config.policy.limits.pending_hellos), (5, Some(3)));
    assert_eq!(config.services.services.len(), 1);
    assert_eq!(config.registries[0].kind, RegistryKind::File { path: files.path().join("conf.d/r.yaml") });
    assert_eq!(&*config.registries[0].name, "r.yaml");
    let watch =
        ["c.yaml", "conf.d", "conf.d/1.yaml", "conf.d/2.yaml", "conf.d/3.yaml", "more.yaml", "none.d"];
    assert_eq!(watched(&files, "c.yaml"), watch);
}

#[test]
fn what_is_said_twice_names_both_places() {
    let files = directory(&[
        (
            "c.yaml",
            &format!(
                "include: b.yaml\nlisten: ':1'\ndrain: {{delay: 1s}}\nservices:\n- {{hostname: a.b, namespace: c, {SERVICE}}}\n"
            ),
        ),
        (
            "b.yaml",
            &format!(
                "drain:\n  delay: 2s\nlisten: ':1'\nservices:\n- {{hostname: A.b., namespace: c, {SERVICE}}}\n"
            ),
        ),
    ]);
    let problems = load_file(files.path(), "c.yaml").expect_err("bad");
    let wanted = [
        "b.yaml:2:10: drain.delay: set twice; first at c.yaml:3:16",
        "b.yaml:3:9: listen: set twice; first at c.yaml:2:9",
        "b.yaml:5:3: services[1]: the service c/a.b is listed twice; first at c.yaml:5:3",
    ];
    assert_eq!(problems, wanted);
}

#[test]
fn a_directory_is_its_files_in_order() {
    let files = directory(&[
        ("d/2.yaml", "listeners: [{name: b, bind: ':2'}]"),
        ("d/1.yaml", "listeners: [{name: a, bind: ':1'}]"),
        ("d/sub/3.yaml", "nonsense"),
    ]);
    let config = load_file(files.path(), "d").expect("good");
    let names: Vec<&str> = config.policy.listeners.iter().map(|listener| &*listener.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(watched(&files, "d"), ["d", "d/1.yaml", "d/2.yaml"]);
    let empty = directory(&[("d/x.txt", "")]);
    let problems = load_file(empty.path(), "d").expect_err("bad");
    assert_eq!(problems, ["d: found no *.yaml file in this directory"]);
    let problems = load_file(empty.path(), "no.yaml").expect_err("bad");
    assert!(problems[0].starts_with("no.yaml: cannot be read: No such file"), "{problems:?}");
}

#[test]
fn an_include_that_cannot_be_is_refused_where_it_is_named() {
    for (include, wanted) in [
        ("b.yaml", "c.yaml:1:10: include: b.yaml: cannot be read: No such file"),
        ("[x*.yaml, b.yaml]", "c.yaml:1:20: include[1]: b.yaml: cannot be read: No such file"),
        ("c.yaml", "c.yaml:1:10: include: c.yaml is included twice"),
        (
            "'*/a.yaml'",
            "c.yaml:1:10: include: found \"*/a.yaml\"; '*' is allowed only in the last part of a path",
        ),
        ("nested.yaml", "nested.yaml:2:1: include: found an include in a file that is itself included"),
        ("{a: b}", "c.yaml:1:10: include: found a map, expected a path"),
        ("[]", "c.yaml:1:10: include: found an empty list"),
        ("latin.yaml", "latin.yaml:2:1: found a byte that is not UTF-8"),
        ("none.d/*.yaml", "c.yaml:1:10: include: cannot list the folder none.d: No such file"),
        ("dangling.d/*", "c.yaml:1:10: include: dangling.d/b.yaml: cannot be read: No such file"),
    ] {
        let main = format!("include: {include}\nlisten: ':1'\n");
        let files = directory(&[("c.yaml", &main), ("nested.yaml", "mesh: {}\ninclude: x.yaml\n")]);
        fs::write(files.path().join("latin.yaml"), b"a: b\nb: \xe9\n").expect("a file");
        fs::create_dir_all(files.path().join("dangling.d/folder.yaml")).expect("a directory");
        symlink("absent.yaml", files.path().join("dangling.d/b.yaml")).expect("a link");
        let problems = load_file(files.path(), "c.yaml").expect_err(include);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with(wanted), "{problems:?}");
    }
    let own = directory(&[("c.yaml", "include: '*.yaml'\nlisten: ':1'\n")]);
    assert!(load_file(own.path(), "c.yaml").is_ok(), "a pattern does not mean the file it stands in");
}

#[test]
fn what_an_unreadable_file_would_have_said_is_not_missed() {
    let files = directory(&[
        (
            "c.yaml",
            "include: b.yaml\nroutes: {a.b: {endpoints: ['c.d:1'], connectTimeout: 5, listeners: [x]}}\n",
        ),
        ("b.yaml", "listen: ':1'\n\tx: y\n"),
    ]);
    let problems = load_file(files.path(), "c.yaml").expect_err("bad");
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems[0].starts_with("c.yaml:2:54: routes[\"a.b\"].connectTimeout"), "{problems:?}");
    assert!(problems[1].starts_with("b.yaml:2:1: found a tab"), "{problems:?}");
}

#[test]
fn relative_paths_start_at_the_file_that_names_them() {
    let files = directory(&[
        ("c.yaml", "include: sub/b.yaml\nlisten: ':1'\n"),
        (
            "sub/b.yaml",
            "telemetry: {accessLog: {path: logs/a.log, format: text}}\nregistries: [{file: {path: /abs, cluster: x}}]\n",
        ),
    ]);
    let config = load_file(files.path(), "c.yaml").expect("good");
    let sink = Sink::File(files.path().join("sub/logs/a.log"));
    assert_eq!(config.access_log, AccessLog::To { sink, format: Format::Text });
    assert_eq!(config.registries[0].kind, RegistryKind::File { path: "/abs".into() });
}

#[test]
fn an_access_log_in_a_file_that_the_gateway_reads_is_refused() {
    let files =
        directory(&[("k/key.pem", ""), ("r/a.yaml", "services: []\n"), ("conf.d/b.yaml", "mesh: {}\n")]);
    symlink("c.yaml", files.path().join("link.log")).expect("a link");
    let rest = "include: conf.d/*.yaml\nlisten: ':1'\nidentity: {files: {certificate: k/cert.pem, key: k/key.pem}}\n\
                registries: [{file: {path: r, cluster: x}}, {file: {path: s.yaml, cluster: y}}]\n";
    let load = |log: &str| {
        let text = format!("telemetry: {{accessLog: {{path: {log}}}}}\n{rest}");
        fs::write(files.path().join("c.yaml"), text).expect("a file");
        load_file(files.path(), "c.yaml").err().unwrap_or_default()
    };
    let read = [
        "c.yaml",
        "./c.yaml",
        "link.log",
        "k/../k/key.pem",
        "k/cert.pem",
        "r/a.yaml",
        "r/new.json",
        "s.yaml",
        "conf.d/new.yaml",
    ];
    for log in read {
        let wanted = format!(
            "c.yaml:1:31: telemetry.accessLog.path: found {log:?}, which is a file that the gateway reads; expected a file of its own"
        );
        assert_eq!(load(log), [wanted]);
    }
    for log in ["a.log", "r/a.log", "conf.d/access.log", "k/access.log", "stdout"] {
        assert!(load(log).is_empty(), "{log}: {:?}", load(log));
    }
}
