//! Replaces `${NAME}` and `${NAME:-default}` in values by environment variables. The result is text and is
//! never parsed as YAML again, so a variable cannot add keys.

use std::borrow::Cow;
use std::ffi::OsString;

use super::problem::InvalidValue;

/// The source of variables: the process's environment, or a test's table.
pub type Environment<'e> = &'e dyn Fn(&str) -> Option<OsString>;

/// Replaces the variables of a text; borrows the text if it has none. `$${` is a literal `${`.
pub fn expand<'t>(text: &'t str, environment: Environment<'_>) -> Result<Cow<'t, str>, InvalidValue> {
    if !text.contains("${") {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            out.push_str(&rest[..at - 1]);
            out.push_str("${");
            rest = &rest[at + 2..];
            continue;
        }
        out.push_str(&rest[..at]);
        let Some((inside, behind)) = rest[at + 2..].split_once('}') else {
            return Err(
                "found '${' without '}'; write ${NAME} or ${NAME:-default}, and $${ for a literal ${".into(),
            );
        };
        out.push_str(&variable(inside, environment)?);
        rest = behind;
    }
    out.push_str(rest);
    Ok(Cow::Owned(out))
}

/// Returns the value of the variable in `${inside}`. As in a shell, `:-` applies if a variable is unset or empty.
fn variable(inside: &str, environment: Environment<'_>) -> Result<String, InvalidValue> {
    let (name, default) = match inside.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inside, None),
    };
    let letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    let legal = name.bytes().next().is_some_and(letter)
        && name.bytes().all(|byte| letter(byte) || byte.is_ascii_digit());
    if !legal {
        let found = inside.chars().take(64).collect::<String>();
        return Err(InvalidValue::new(format!(
            "found \"${{{}}}\"; a variable's name is letters, digits and '_': write ${{NAME}} or \
             ${{NAME:-default}}, and $${{ for a literal ${{",
            found.escape_debug()
        )));
    }
    let value = environment(name).map(OsString::into_string).transpose();
    let value = value.map_err(|_| {
        InvalidValue::new(format!("the value of the environment variable {name} is not UTF-8"))
    })?;
    match (value, default) {
        (Some(value), None) => Ok(value),
        (Some(value), Some(_)) if !value.is_empty() => Ok(value),
        (_, Some(default)) => Ok(default.to_owned()),
        (None, None) => Err(InvalidValue::new(format!(
            "the environment variable {name} is not set; set it, or give a default: ${{{name}:-default}}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use super::expand;

    fn expanded(text: &str) -> Result<String, String> {
        let environment = |name: &str| match name {
            "PORT" => Some("8443".into()),
            "EMPTY" => Some("".into()),
            "NESTED" => Some("${PORT}".into()),
            "LATIN" => Some(OsString::from_vec(b"\xe9".to_vec())),
            _ => None,
        };
        expand(text, &environment).map(std::borrow::Cow::into_owned).map_err(|fault| fault.message)
    }

    #[test]
    fn variables_are_replaced_once() {
        assert_eq!(expanded("10.0.0.1:${PORT}").as_deref(), Ok("10.0.0.1:8443"));
        assert_eq!(expanded("${NO:-a}${PORT}${EMPTY:-b}${EMPTY}").as_deref(), Ok("a8443b"));
        assert_eq!(expanded("${NO:-}").as_deref(), Ok(""));
        assert_eq!(expanded("${NESTED}").as_deref(), Ok("${PORT}"));
    }

    #[test]
    fn two_dollars_are_a_literal_and_one_alone_is_itself() {
        assert_eq!(expanded("$${PORT}").as_deref(), Ok("${PORT}"));
        assert_eq!(expanded("$${${PORT}").as_deref(), Ok("${8443"));
        assert_eq!(expanded("a$b$$c$").as_deref(), Ok("a$b$$c$"));
    }

    #[test]
    fn what_cannot_be_replaced_is_refused() {
        assert!(expanded("${NO}").is_err_and(|text| text.contains("NO is not set")));
        assert!(expanded("${LATIN:-x}").is_err_and(|text| text.contains("LATIN is not UTF-8")));
        assert!(expanded("${PORT").is_err_and(|text| text.contains("without '}'")));
        for bad in ["${}", "${1A}", "${A B}", "${:-x}", "${A-x}"] {
            assert!(expanded(bad).is_err_and(|text| text.contains("name is letters")), "{bad}");
        }
    }
}
