//! Generates Rust types from `proto/` with their shapes, and the descriptors that a test compares with the official ones.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::{env, fs};

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorProto};
use protox::Compiler;

/// The folder of the `.proto` files, from the folder of this crate.
const PROTO: &str = "../../proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={PROTO}");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo names no OUT_DIR")?);
    let mut files = Vec::new();
    find(Path::new(PROTO), &mut files)?;
    files.sort();

    let mut compiler = Compiler::new([PROTO])?;
    // The source info holds the comments, which become the documentation of the types.
    compiler.include_imports(true).include_source_info(true).open_files(&files)?;
    prost_build::Config::new()
        .include_file("proto.rs")
        // Encoding must be deterministic: clients must not see a change if there is none.
        .btree_map(["."])
        .out_dir(&out)
        .compile_fds(compiler.file_descriptor_set())?;

    fs::write(out.join("shapes.rs"), Messages::of(&compiler.file_descriptor_set().file).shapes()?)?;

    compiler.include_source_info(false);
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;
    Ok(())
}

/// Collects the `.proto` files of a folder and of those below it.
fn find(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            found.push(path);
        }
    }
    Ok(())
}

/// The message types by their full names, each with its path in Rust.
#[derive(Default)]
struct Messages<'a>(BTreeMap<String, (String, &'a DescriptorProto)>);

impl<'a> Messages<'a> {
    fn of(files: &'a [FileDescriptorProto]) -> Self {
        let mut messages = Self::default();
        for file in files {
            let (package, name) = (file.package(), file.name());
            let (prefix, path) = match package {
                "" => (String::new(), "crate".to_owned()),
                // Other messages of Google have no items that are messages.
                "google.protobuf" if name != "google/protobuf/struct.proto" => continue,
                "google.protobuf" => (format!(".{package}"), "prost_types".to_owned()),
                _ => {
                    // `type` is a keyword.
                    let modules = package.replace(".type.", ".r#type.").replace('.', "::");
                    (format!(".{package}"), format!("crate::{modules}"))
                }
            };
            messages.add(&prefix, &path, &file.message_type);
        }
        messages
    }

    fn add(&mut self, prefix: &str, path: &str, found: &'a [DescriptorProto]) {
        for message in found {
            let name = format!("{prefix}.{}", message.name());
            let nested = format!("{path}::{}", snake(message.name()));
            self.add(&name, &nested, &message.nested_type);
            self.0.insert(name, (format!("{path}::{}", camel(message.name())), message));
        }
    }

    /// Returns the Rust code of the shapes.
    fn shapes(&self) -> Result<String, fmt::Error> {
        let mut code = "use isthmus_wire::outline::{Content, Field, Outlined, Shape};\n".to_owned();
        for (name, (path, message)) in &self.0 {
            let fields: Vec<String> =
                message.field.iter().filter_map(|field| self.field(path, field)).collect();
            writeln!(code, "static {}: Shape = Shape(&[{}]);", shape(name), fields.join(", "))?;
            if path.starts_with("crate::") && !is_entry(message) {
                let body = format!("fn shape() -> &'static Shape {{ &{} }}", shape(name));
                writeln!(code, "impl Outlined for {path} {{ {body} }}")?;
            }
        }
        Ok(code)
    }

    /// Returns the Rust code of a field of the type at `path`; `None` if the field is within the memory of its message.
    fn field(&self, path: &str, field: &FieldDescriptorProto) -> Option<String> {
        let is_list = field.label() == Label::Repeated;
        let known = self.0.contains_key(field.type_name());
        let content = match field.r#type() {
            Type::Message
                if field.type_name() == ".google.protobuf.Struct" && path.starts_with("crate::") =>
            {
                format!("Metadata(&{})", shape(field.type_name()))
            }
            Type::Message if known => format!("Message(&{})", shape(field.type_name())),
            _ if !is_list => return None,
            Type::Message | Type::String | Type::Bytes => "Bytes".to_owned(),
            _ => "Numbers".to_owned(),
        };
        let item = match is_list {
            true => format!("Some(size_of::<{}>())", self.item(field)),
            false => "None".to_owned(),
        };
        Some(format!("Field {{ number: {}, item: {item}, content: Content::{content} }}", field.number()))
    }

    /// Returns the Rust type of an item of a field.
    fn item(&self, field: &FieldDescriptorProto) -> String {
        match (field.r#type(), self.0.get(field.type_name())) {
            (Type::Message, Some((_, entry))) if is_entry(entry) => {
                let parts: Vec<String> = entry.field.iter().map(|field| self.item(field)).collect();
                format!("({})", parts.join(", "))
            }
            (Type::Message, Some((path, _))) => path.clone(),
            (Type::Message, None) => {
                format!("prost_types::{}", field.type_name().rsplit('.').next().unwrap_or_default())
            }
            (Type::String | Type::Bytes, _) => "String".to_owned(),
            _ => "u64".to_owned(),
        }
    }
}

/// Returns true if the message is an entry of a map.
fn is_entry(message: &DescriptorProto) -> bool {
    message.options.as_ref().is_some_and(|options| options.map_entry())
}

/// Returns the name of the shape of a message.
fn shape(name: &str) -> String {
    name.trim_start_matches('.').replace('.', "_").to_uppercase()
}

/// Returns the name that prost gives a message: that of `X509SVIDResponse` is `X509svidResponse`.
fn camel(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    let mut is_upper = false;
    let of = letters.iter().enumerate().map(|(at, letter)| {
        let begins = !is_upper || letters.get(at + 1).is_some_and(char::is_ascii_lowercase);
        is_upper = letter.is_ascii_uppercase() || letter.is_ascii_digit() && is_upper;
        if begins { *letter } else { letter.to_ascii_lowercase() }
    });
    of.collect()
}

/// Returns the name that prost gives the module of the messages within a message.
fn snake(name: &str) -> String {
    let mut module = String::new();
    for letter in camel(name).chars() {
        if letter.is_ascii_uppercase() && !module.is_empty() {
            module.push('_');
        }
        module.push(letter.to_ascii_lowercase());
    }
    module
}
